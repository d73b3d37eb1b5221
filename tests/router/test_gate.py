"""Lines and promises over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.job import Tier
from services.router.admission import SHORTEST_S, Left
from services.router.gate import QUIET_S, Gate
from services.router.pace import ENOUGH, WINDOW_S, Pace

LEFT = Left(queue_s=10.0, first_token_s=60.0)


def backlogged(jobs: int, gap_s: float) -> tuple[Gate, dict[str, dict[int, int]], float]:
    """A gate that saw free jobs of lane 1 and 2 leave the queue every `gap_s` seconds, and `jobs` that still wait."""
    gate, waiting, now = Gate(), {"free": {1: jobs // 2, 2: jobs - jobs // 2}}, 0.0
    gate.sees(waiting, now)
    for _ in range(10):
        now += gap_s
        gate.placed("free", now)
    return gate, waiting, now


def test_the_wait_is_what_stands_before_over_how_fast_it_leaves() -> None:
    gate, waiting, now = backlogged(6, 0.5)
    assert abs(gate.line(Tier.FREE, 1, waiting, now).wait_s - 3.0) < 1e-9
    assert abs(gate.line(Tier.FREE, 1, waiting, now, others=3).wait_s - 1.0) < 1e-9, "three routers empty it"


def test_higher_tiers_stand_before_lower_ones_and_not_behind_them() -> None:
    gate, waiting, now = backlogged(6, 0.5)
    assert gate.line(Tier.ENTERPRISE, 1, waiting, now).wait_s == 0.0
    paid = Gate()
    paid.sees({"paid": {0: 40}}, 0.0)
    for placed in range(ENOUGH):
        paid.placed("paid", 1.0 + placed)
    assert paid.enter(Tier.FREE, 3, {"paid": {0: 40}}, LEFT, 8.0) is not None, "nobody of its own tier waits"


def test_a_promise_is_kept_and_holds_for_its_lane_and_tier_only() -> None:
    gate, waiting, now = backlogged(20, 0.5)
    away = gate.enter(Tier.FREE, 1, waiting, LEFT, now)
    assert away is not None
    assert away.retry_after >= 10.0
    empty: dict[str, dict[int, int]] = {}
    later = gate.enter(Tier.FREE, 1, empty, LEFT, now + 4.0)
    assert later is not None
    assert abs(later.retry_after - (away.retry_after - 4.0)) < 1e-6
    assert gate.enter(Tier.FREE, 2, empty, LEFT, now + 4.0) is None
    assert gate.enter(Tier.PAID, 1, empty, LEFT, now + 4.0) is None
    assert gate.enter(Tier.FREE, 1, empty, LEFT, now + away.retry_after) is None


def test_a_lane_opens_when_it_was_promised_however_many_ask_before() -> None:
    """Found by a trace: who came in a lane's last second was told a whole one, and closed it for that long, over and over.
    A lane that was never a second without a caller stayed closed while nobody waited."""
    gate, waiting, now = backlogged(20, 0.5)
    first = gate.enter(Tier.FREE, 1, waiting, LEFT, now)
    assert first is not None
    empty: dict[str, dict[int, int]] = {}
    opens = now + first.retry_after
    while now + 0.1 < opens:
        now += 0.1
        away = gate.enter(Tier.FREE, 1, empty, LEFT, now)
        assert away is not None
        assert away.retry_after == max(SHORTEST_S, opens - now)
    assert gate.enter(Tier.FREE, 1, empty, LEFT, opens) is None


def test_every_lane_opens_once_nobody_has_waited_for_a_while() -> None:
    """Found by the soak: workers were back and idle, and a router went on to turn away for the minute that it had promised."""
    gate, waiting, now = backlogged(40, 0.5)
    away = gate.enter(Tier.FREE, 1, waiting, LEFT, now)
    assert away is not None
    assert away.retry_after > 2 * QUIET_S
    gate.sees({}, now + 0.1)
    gate.sees({"free": {2: 1}}, now + 0.2)
    for seen in (0.3, 0.2 + QUIET_S):
        gate.sees({}, now + seen)
        assert gate.enter(Tier.FREE, 1, {}, LEFT, now + seen) is not None, "the line was empty for a moment only"
    gate.sees({}, now + 0.3 + QUIET_S)
    assert gate.enter(Tier.FREE, 1, {}, LEFT, now + 0.3 + QUIET_S) is None


def test_asking_changes_nothing() -> None:
    gate, waiting, now = backlogged(20, 0.5)
    first = gate.ask(Tier.FREE, 1, waiting, LEFT, now)
    assert first is not None
    assert gate.ask(Tier.FREE, 1, waiting, LEFT, now) == first
    assert gate.ask(Tier.FREE, 1, {}, LEFT, now) is None


def measured(gap_s: float) -> tuple[Pace, float]:
    pace, now = Pace(), 0.0
    pace.waits(1, now)
    for _ in range(ENOUGH):
        now += gap_s
        pace.placed(now)
    return pace, now


def test_a_quiet_time_makes_no_queue_slow() -> None:
    pace, now = measured(0.1)
    pace.waits(0, now)
    assert abs(pace.gap(1000.0) - 0.1) < 1e-9
    pace.waits(1, 1000.0)
    pace.placed(1000.1)
    assert abs(pace.gap(1000.1) - 0.1) < 1e-6


def test_a_queue_that_stands_still_is_seen_to() -> None:
    pace, now = measured(0.1)
    assert pace.gap(now + 20.0) > 2.0


def test_a_few_measurements_are_none() -> None:
    """Found by a simulation: a burst to a small cluster was refused because the first batch had not ended yet."""
    pace = Pace()
    pace.waits(40, 5.0)
    assert pace.gap(7.0) == 0.0
    pace.placed(8.0)
    assert pace.gap(8.0) == 0.0
    assert pace.gap(5.0 + WINDOW_S) > 0.0, "it stands still"


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(list(Tier)), st.integers(0, 15), st.booleans()), max_size=60),
    st.integers(0, 50),
)
def test_whatever_came_before_an_empty_queue_opens_within_the_longest_promise(
    steps: list[tuple[float, Tier, int, bool]], jobs: int
) -> None:
    gate, now = Gate(), 0.0
    for wait, tier, lane, placed in steps:
        now += wait
        waiting = {tier.value: {lane: jobs}} if jobs else {}
        gate.sees(waiting, now)
        if placed:
            gate.placed(tier, now)
        gate.enter(tier, lane, waiting, LEFT, now)
    for tier in Tier:
        for lane in range(16):
            assert gate.ask(tier, lane, {}, LEFT, now + 120.0) is None
