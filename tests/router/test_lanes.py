from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.job import Tier
from services.router.lanes import AGE_S, QUANTUM, Tiers, Waiting, charge, next_turn, note


def serve(waiting: Waiting, cost: dict[int, int], turns: int, every_s: float = 0.0) -> list[tuple[str, int]]:
    """`turns` turns while the same lanes stay full; each job of a lane costs what `cost` says."""
    tiers: Tiers = {}
    now, served = 0.0, []
    for _ in range(turns):
        tiers = note(tiers, waiting, now)
        turn = next_turn(tiers, waiting, now)
        assert turn is not None
        served.append((turn.tier, turn.lane))
        tiers = charge(turn.tiers, turn.tier, turn.lane, cost.get(turn.lane, 100))
        now += every_s
    return served


def test_nothing_waits() -> None:
    assert next_turn(note({}, {}, 0.0), {}, 0.0) is None
    assert next_turn(note({}, {"paid": {1: 0}}, 0.0), {"paid": {1: 0}}, 0.0) is None


@pytest.mark.parametrize(
    ("waiting", "first"),
    [
        pytest.param({"free": {0: 1}, "enterprise": {3: 1}, "paid": {2: 1}}, ("enterprise", 3), id="the highest tier"),
        pytest.param({"free": {0: 1}, "enterprise": {3: 0}, "paid": {2: 1}}, ("paid", 2), id="an empty lane does not count"),
        pytest.param({"odd": {0: 1}, "free": {1: 1}}, ("free", 1), id="an unknown tier is the last"),
        pytest.param({"paid": {4: 1, 2: 1}}, ("paid", 2), id="lanes from the first on"),
    ],
)
def test_first_turn(waiting: Waiting, first: tuple[str, int]) -> None:
    assert serve(waiting, {}, 1) == [first]


def test_a_lower_tier_is_served_after_it_aged() -> None:
    served = serve({"enterprise": {0: 9}, "free": {0: 9}}, {}, turns=40, every_s=1.0)
    frees = [second for second, (tier, _) in enumerate(served) if tier == "free"]
    assert frees, "starved"
    assert frees[0] == pytest.approx(2 * AGE_S, abs=1.0)
    assert len(frees) <= 4, "the higher tier keeps nearly everything"


def test_a_turn_that_came_to_nothing_changes_nothing() -> None:
    waiting = {"paid": {0: 1, 1: 1}}
    tiers = note({}, waiting, 0.0)
    assert next_turn(tiers, waiting, 0.0) == next_turn(tiers, waiting, 0.0)


def test_large_jobs_take_fewer_turns() -> None:
    served = Counter(lane for _, lane in serve({"paid": {0: 9, 1: 9}}, {0: 4 * QUANTUM, 1: QUANTUM}, turns=500))
    assert served[1] == pytest.approx(4 * served[0], rel=0.05)


def test_one_job_at_a_time_buys_no_advantage() -> None:
    """A lane that shows one large job at a time, and is empty in between, is still charged for all of it."""
    tiers: Tiers = {}
    served: Counter[int] = Counter()
    just_served = -1
    for _ in range(500):
        waiting = {"paid": {lane: 1 for lane in (0, 1) if lane == 1 or just_served != 0}}
        tiers = note(tiers, waiting, 0.0)
        turn = next_turn(tiers, waiting, 0.0)
        assert turn is not None
        just_served = turn.lane
        served[turn.lane] += 1
        tiers = charge(turn.tiers, turn.tier, turn.lane, 4 * QUANTUM if turn.lane == 0 else QUANTUM)
    assert served[1] >= 2.5 * served[0], "by turns it would be one to one, by tokens four to one"


def test_what_a_lane_used_alone_is_not_held_against_it() -> None:
    alone: Waiting = {"paid": {0: 9}}
    tiers: Tiers = {}
    for _ in range(100):
        tiers = note(tiers, alone, 0.0)
        turn = next_turn(tiers, alone, 0.0)
        assert turn is not None
        tiers = charge(turn.tiers, turn.tier, turn.lane, 10 * QUANTUM)
    both: Waiting = {"paid": {0: 9, 1: 9}}
    served: Counter[int] = Counter()
    for _ in range(40):
        tiers = note(tiers, both, 0.0)
        turn = next_turn(tiers, both, 0.0)
        assert turn is not None
        served[turn.lane] += 1
        tiers = charge(turn.tiers, turn.tier, turn.lane, QUANTUM)
    assert served[0] >= 14, served  # the last job it ran alone cost ten turns, not a thousand


@given(st.dictionaries(st.integers(0, 15), st.integers(1, 5_000), min_size=2, max_size=6), st.integers(200, 400))
def test_lanes_share_tokens(cost: dict[int, int], turns: int) -> None:
    """Full lanes are charged alike: never further apart than a quantum and a job of each."""
    served = serve({Tier.PAID: dict.fromkeys(cost, 99)}, cost, turns)
    tokens = dict.fromkeys(cost, 0)
    for _, lane in served:
        tokens[lane] += cost[lane]
    for one in cost:
        for other in cost:
            assert abs(tokens[one] - tokens[other]) <= QUANTUM + cost[one] + cost[other]
