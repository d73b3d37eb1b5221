"""Which lane of a model's queue is next: tier by priority with ageing, lane by deficit round robin. Pure functions.

Knows no bus and no clock: `now` comes in, a new state goes out. Invariants: no waiting tier is passed over for ever, and
while two lanes of a tier wait, the tokens each was charged differ by at most one quantum and one job of each.

Method: deficit round robin (Shreedhar and Varghese, 1995), charged after the pull, because the cost is known only then. A lane is
therefore served while its deficit is positive and may end below zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from schemas.job import LANES, Tier

RANK: dict[str, int] = {Tier.ENTERPRISE: 0, Tier.PAID: 1, Tier.FREE: 2}
AGE_S = 5.0
"""Seconds without service that lift a waiting tier by one rank."""
QUANTUM = 512
"""Tokens a lane earns a round."""

Waiting = Mapping[str, Mapping[int, int]]
"""tier -> lane -> jobs; entries of 0 jobs do not count."""


@dataclass(frozen=True, slots=True)
class TierState:
    """`since`: when the tier was last served or began to wait. `deficits`: tokens, by lane. `cursor`: the lane being served."""

    since: float
    deficits: Mapping[int, int] = field(default_factory=dict)
    cursor: int = -1


Tiers = Mapping[str, TierState]


@dataclass(frozen=True, slots=True)
class Turn:
    """The lane whose turn it is, and the state to go on with when a job was pulled from it."""

    tier: str
    lane: int
    tiers: Tiers


def note(tiers: Tiers, waiting: Waiting, now: float) -> Tiers:
    """`tiers` without those in which nothing waits, and with those that begin to wait at `now`."""
    return {tier: tiers.get(tier) or TierState(since=now) for tier, lanes in waiting.items() if any(lanes.values())}


def next_turn(tiers: Tiers, waiting: Waiting, now: float) -> Turn | None:
    """Whose turn it is among those of `waiting` that `tiers` has noted; None when nothing waits. Unknown tiers come last."""
    eligible = [tier for tier, lanes in waiting.items() if tier in tiers and any(lanes.values())]
    if not eligible:
        return None
    tier = min(eligible, key=lambda name: (rank(name) - (now - tiers[name].since) / AGE_S, rank(name)))
    state = _advance(tiers[tier], sorted(lane for lane, jobs in waiting[tier].items() if jobs > 0))
    return Turn(tier, state.cursor, {**tiers, tier: replace(state, since=now)})


def rank(tier: str) -> int:
    """0 is the highest."""
    return RANK.get(tier, len(RANK))


def charge(tiers: Tiers, tier: str, lane: int, tokens: int) -> Tiers:
    """`tiers` after `lane` was given work of `tokens`."""
    state = tiers.get(tier)
    if state is None:
        return tiers
    left = state.deficits.get(lane, 0) - tokens
    return {**tiers, tier: replace(state, deficits={**state.deficits, lane: left})}


def _advance(state: TierState, lanes: list[int]) -> TierState:
    """The cursor on the first of `lanes` with something left, after as many rounds as that takes (in one go)."""
    if state.cursor in lanes and state.deficits.get(state.cursor, 0) > 0:
        return state
    order = sorted(lanes, key=lambda lane: (lane - state.cursor - 1) % LANES)
    needed = {lane: _visits(state.deficits.get(lane, 0)) for lane in order}
    chosen = min(order, key=lambda lane: needed[lane])
    before = order[: order.index(chosen) + 1]
    deficits = {}
    for lane in {*state.deficits, *lanes}:
        earned = needed[chosen] - (lane in order and lane not in before)
        left = state.deficits.get(lane, 0) + max(0, earned) * QUANTUM
        # An empty lane pays its debt off, so that one job at a time buys no advantage, and saves nothing up.
        deficits[lane] = left if lane in order else min(0, left)
    return replace(state, deficits=deficits, cursor=chosen)


def _visits(deficit: int) -> int:
    """Visits until `deficit` is positive; each earns a quantum."""
    return max(0, 1 + -deficit // QUANTUM)
