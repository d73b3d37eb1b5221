"""Who may join the line of one model: the state behind `admission`. Knows no bus and no clock; times are passed in.

Owns each tier's pace, and which lanes are closed to which tier until when. Invariants: a Retry-After is a promise of this router:
until then it turns that lane's jobs of that tier away, so nobody takes the room they were told to wait for; after it they are
judged anew, however many asked meanwhile. Lanes close and open at times of their own, so that room is always somebody's. Once
nobody has waited for a while, all open: what made the line slow is over, and nobody is turned away from workers that idle.
"""

from __future__ import annotations

from schemas.job import Tier
from services.router.admission import Left, Line, TurnedAway, closed, judge
from services.router.lanes import Waiting, rank
from services.router.pace import Pace

QUIET_S = 1.0
"""An empty line of an overloaded model fills again sooner."""


class Gate:
    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._closed: dict[tuple[str, int], float] = {}
        self._quiet: float | None = None
        """Since when nobody waits."""

    def sees(self, waiting: Waiting, now: float) -> None:
        """What waits, by tier and lane. Call it when that changes, and now and then."""
        counts = {tier: sum(waiting.get(tier, {}).values()) for tier in Tier}
        for tier, jobs in counts.items():
            self._pace(tier).waits(jobs, now)
        if any(counts.values()):
            self._quiet = None
        elif self._quiet is None:
            self._quiet = now
        elif now - self._quiet >= QUIET_S:
            self._closed.clear()

    def placed(self, tier: str, now: float) -> None:
        """A job that waited was given to a worker. Before `sees` hears that it waits no more."""
        self._pace(tier).placed(now)

    def line(self, tier: Tier, lane: int, waiting: Waiting, now: float, others: float = 1.0) -> Line:
        """What a new job would stand behind. `others`: how many routers place what waits, each as fast as we do."""
        lanes = {number: jobs for number, jobs in waiting.get(tier, {}).items() if jobs > 0}
        pace = self._pace(tier)
        gap = pace.gap(now) / others
        jobs = ahead = sum(lanes.values())
        above = 0.0
        for other in (other for other in Tier if rank(other) < rank(tier)):
            more = sum(waiting.get(other, {}).values())
            ahead += more
            above += more * self._pace(other).gap(now) / others
        pressure = max(1.0, pace.demand(now) * pace.gap(now))
        return Line(max(jobs * gap, above), ahead, jobs, lanes.get(lane, 0), len(lanes), pressure)

    def enter(self, tier: Tier, lane: int, waiting: Waiting, left: Left, now: float, others: float = 1.0) -> TurnedAway | None:
        """One new job asks. None: it may be placed, or wait."""
        self._pace(tier).offered(now)
        opens = self._closed.get((tier, lane), now)
        away = self.ask(tier, lane, waiting, left, now, others)
        # A closed lane is not closed again: who comes in its last second is told a whole one, and it would never open.
        if away is not None and opens <= now:
            self.close(tier, lane, now + away.retry_after)
        return away

    def ask(self, tier: Tier, lane: int, waiting: Waiting, left: Left, now: float, others: float = 1.0) -> TurnedAway | None:
        """What `enter` would say, and nothing comes of it."""
        until = self._closed.get((tier, lane), now)
        if until > now:
            return closed(tier, until - now)
        return judge(tier, self.line(tier, lane, waiting, now, others), left)

    def close(self, tier: Tier, lane: int, until: float) -> None:
        """To new work of `tier` and `lane`. A promise that was made is not taken back."""
        self._closed[tier, lane] = max(until, self._closed.get((tier, lane), until))

    def _pace(self, tier: str) -> Pace:
        return self._paces.setdefault(tier, Pace())
