"""Whether new work may join the line of its tier, and when to come again if not. Pure functions.

Knows no bus, no clock, no worker. Invariants: a resume is never judged here; a job before which hardly anybody waits is never
turned away; of two jobs that see the same line the one of the higher tier is turned away last; Retry-After is 1 to 120 s.

The wait before a job is predicted from what waits and how fast its tier leaves the queue while somebody waits there. Each tier
may fill a part of a job's deadlines with it: free the least, so free is refused first, paid queues while there is capacity, and
enterprise is turned away only when its token would come too late.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import RateLimited, Unavailable
from schemas.job import Tier
from services.router.placement import Why

SHORTEST_S, LONGEST_S = 1.0, 120.0
"""Of a Retry-After. Clients do not retry at all when told to wait longer."""
FAIR = 2.0
"""A lane that has more than so many times an equal part of its tier's line is over its share: it may fill half of the bound."""
FEW = 1
"""Jobs that may wait for a better worker rather than for room: they say nothing of how fast a line is."""
AT_ONCE_S = 0.05
"""A worker that could begin so soon is as good as idle: nothing would be faster, so its prediction turns nobody away."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`wait`: share of a job's deadlines that its predicted wait may take. `kv`: how full decode's KV may be with it."""

    wait: float
    kv: float


BOUNDS: dict[Tier, Bound] = {
    Tier.ENTERPRISE: Bound(wait=1.0, kv=1.0),
    Tier.PAID: Bound(wait=0.8, kv=0.98),
    Tier.FREE: Bound(wait=0.4, kv=0.95),
}


@dataclass(frozen=True, slots=True)
class Line:
    """What a new job would wait behind. `ahead`: jobs of its tier and higher ones, `wait_s`: how long they take, predicted.

    Of the `jobs` of its own tier `ours` are of its lane, which is one of `lanes` that wait.
    `pressure`: how many times faster jobs of its tier come than they leave the queue, at least 1.
    """

    wait_s: float = 0.0
    ahead: int = 0
    jobs: int = 0
    ours: int = 0
    lanes: int = 0
    pressure: float = 1.0

    @property
    def over_share(self) -> bool:
        """Our lane has more than its part of the line, and others wait too."""
        return self.lanes > 1 and self.ours * self.lanes > FAIR * self.jobs


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds until a job's deadlines for leaving the queue and for its first token. `anew_s`: until the latter if it came now,
    0 = not said."""

    queue_s: float = float("inf")
    first_token_s: float = float("inf")
    anew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """`code` of `schemas.errors`, and what a caller may read."""

    code: str
    reason: str
    retry_after: float


@dataclass(frozen=True, slots=True)
class Stays:
    """It waits in the queue."""

    reason: str


def judge(tier: Tier, line: Line, left: Left) -> TurnedAway | None:
    """None: it may join the line. Its lane should stay closed to its tier for `retry_after`, so that the promise is kept."""
    most = BOUNDS[tier].wait * min(left.queue_s, left.first_token_s)
    if line.ahead <= FEW or line.wait_s <= (most / 2 if line.over_share else most):
        return None
    again = within_bounds(line.wait_s * line.pressure)
    if line.wait_s <= most:
        return TurnedAway(RateLimited.code or "", "You have more than your share of the requests that wait.", again)
    return closed(tier, again)


def closed(tier: Tier, seconds: float) -> TurnedAway:
    """The answer while a lane is closed for `seconds` more."""
    reason = f"There is no capacity for more {tier.value} requests now."
    return TurnedAway(Unavailable.code or "", reason, within_bounds(seconds))


def late(why: Why, left: Left) -> bool:
    """Its first token would come after its deadline because others are before it at this worker. It may wait for another one."""
    return why.ttft_s > left.first_token_s and why.wait_s > AT_ONCE_S


def at_worker(tier: Tier, why: Why, left: Left) -> TurnedAway | Stays | None:
    """What becomes of new work for which a worker was chosen. None: the worker is asked.

    One whose first token would be late there waits for another worker, and is turned away once even an idle one would be late.
    It may come again as soon as this worker would be in time for the same request with new deadlines, or is done with the others.
    KV pressure: what room decode has left is for higher tiers.
    """
    if late(why, left):
        if why.ttft_s - why.wait_s <= left.first_token_s:
            return Stays("late")
        reason = "No worker can begin this request in time."
        return TurnedAway(Unavailable.code or "", reason, within_bounds(min(why.wait_s, why.ttft_s - left.anew_s)))
    if why.kv > BOUNDS[tier].kv and why.busy:
        return Stays("kv_pressure")
    return None


def within_bounds(seconds: float) -> float:
    return min(max(seconds, SHORTEST_S), LONGEST_S)
