"""Who may join the line, as pure functions: tables, and what holds whatever is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.job import Tier
from services.router.admission import BOUNDS, LONGEST_S, SHORTEST_S, Left, Line, Stays, TurnedAway, at_worker, judge
from services.router.placement import Why

IN_TIME = Left(queue_s=30.0, first_token_s=120.0)


def a_line(wait_s: float, *, ours: int = 1, lanes: int = 4, jobs: int = 20, pressure: float = 1.0) -> Line:
    return Line(wait_s, jobs, jobs, ours, lanes, pressure)


def why(ttft_s: float = 1.0, wait_s: float = 0.5, kv: float = 0.5, *, busy: bool = True) -> Why:
    return Why(ttft_s, 100, 0.5, 1, 0, wait_s, kv, busy)


@pytest.mark.parametrize(
    ("wait_s", "turned_away"),
    [
        (0.0, set()),
        (11.9, set()),
        (12.1, {Tier.FREE}),
        (24.1, {Tier.FREE, Tier.PAID}),
        (30.1, {Tier.FREE, Tier.PAID, Tier.ENTERPRISE}),
    ],
)
def test_free_is_turned_away_first_and_enterprise_last(wait_s: float, turned_away: set[Tier]) -> None:
    assert {tier for tier in Tier if judge(tier, a_line(wait_s), IN_TIME) is not None} == turned_away


def test_the_nearer_deadline_counts() -> None:
    assert judge(Tier.ENTERPRISE, a_line(5.0), Left(queue_s=30.0, first_token_s=4.0)) is not None
    assert judge(Tier.ENTERPRISE, a_line(5.0), Left(queue_s=4.0, first_token_s=30.0)) is not None
    assert judge(Tier.ENTERPRISE, a_line(5.0), Left(queue_s=30.0, first_token_s=30.0)) is None


def test_who_has_most_of_the_line_is_told_so_earlier() -> None:
    line = a_line(8.0, ours=11)
    over = judge(Tier.FREE, line, IN_TIME)
    assert over is not None
    assert over.code == "rate_limit_exceeded"
    assert judge(Tier.FREE, a_line(8.0, ours=10), IN_TIME) is None


def test_who_waits_alone_is_over_no_share() -> None:
    assert judge(Tier.FREE, a_line(8.0, ours=20, lanes=1), IN_TIME) is None
    alone = judge(Tier.FREE, a_line(20.0, ours=20, lanes=1), IN_TIME)
    assert alone is not None
    assert alone.code == "no_capacity"


@pytest.mark.parametrize(("wait_s", "pressure", "expected"), [(13.0, 1.0, 13.0), (13.0, 2.0, 26.0), (100.0, 9.0, LONGEST_S)])
def test_retry_after_is_the_wait_of_all_who_come(wait_s: float, pressure: float, expected: float) -> None:
    away = judge(Tier.FREE, a_line(wait_s, pressure=pressure), IN_TIME)
    assert away is not None
    assert away.retry_after == expected


def test_a_first_token_that_comes_too_late_is_no_work_for_a_busy_worker() -> None:
    left = Left(first_token_s=2.0)
    assert at_worker(Tier.PAID, why(ttft_s=9.0, wait_s=8.0), left) == Stays("late"), "another worker may be free in time"
    away = at_worker(Tier.PAID, why(ttft_s=9.0), left)
    assert isinstance(away, TurnedAway)
    assert away.code == "no_capacity"
    assert at_worker(Tier.PAID, why(ttft_s=1.9), left) is None
    assert at_worker(Tier.PAID, why(ttft_s=9.0, wait_s=0.0), left) is None, "an idle worker is as fast as it gets"


@pytest.mark.parametrize(
    ("wait_s", "waited_s", "expected"), [(0.1, 0.0, SHORTEST_S), (6.5, 0.0, 6.5), (6.5, 60.0, 6.5), (500.0, 0.0, LONGEST_S)]
)
def test_who_is_late_may_come_again_when_the_worker_is_done_with_others(wait_s: float, waited_s: float, expected: float) -> None:
    """However late it is: it comes again with new deadlines."""
    away = at_worker(Tier.FREE, why(ttft_s=wait_s + 9.0, wait_s=wait_s), Left(first_token_s=2.0 - waited_s))
    assert isinstance(away, TurnedAway)
    assert away.retry_after == expected


@pytest.mark.parametrize(
    ("wait_s", "compute_s", "anew_s", "expected"), [(6.5, 9.0, 10.0, 5.5), (6.5, 2.0, 10.0, SHORTEST_S), (6.5, 9.0, 4.0, 6.5)]
)
def test_or_as_soon_as_it_would_be_in_time_with_new_deadlines(
    wait_s: float, compute_s: float, anew_s: float, expected: float
) -> None:
    away = at_worker(Tier.FREE, why(ttft_s=wait_s + compute_s, wait_s=wait_s), Left(first_token_s=0.0, anew_s=anew_s))
    assert isinstance(away, TurnedAway)
    assert away.retry_after == expected


def test_what_kv_has_left_is_kept_for_higher_tiers_while_more_will_be_free() -> None:
    nearly_full = why(kv=0.99)
    stays = Stays("kv_pressure")
    assert [at_worker(tier, nearly_full, Left()) for tier in (Tier.ENTERPRISE, Tier.PAID, Tier.FREE)] == [None, stays, stays]
    assert at_worker(Tier.FREE, why(kv=1.0, busy=False), Left()) is None, "nothing will be freed"


waits = st.floats(0.0, 500.0)
lines = st.builds(
    Line,
    wait_s=waits,
    ahead=st.integers(0, 1000),
    jobs=st.integers(0, 1000),
    ours=st.integers(0, 1000),
    lanes=st.integers(0, 16),
    pressure=st.floats(1.0, 100.0),
)
lefts = st.builds(Left, queue_s=st.floats(-5.0, 500.0), first_token_s=st.floats(-5.0, 500.0))


@given(lines, lefts)
def test_no_tier_is_turned_away_before_a_lower_one(line: Line, left: Left) -> None:
    left = Left(max(0.0, left.queue_s), max(0.0, left.first_token_s))
    enterprise, paid, free = (judge(tier, line, left) is not None for tier in (Tier.ENTERPRISE, Tier.PAID, Tier.FREE))
    assert enterprise <= paid <= free


@given(st.sampled_from(list(Tier)), lines, lefts)
def test_every_refusal_has_a_reason_and_a_time(tier: Tier, line: Line, left: Left) -> None:
    away = judge(tier, line, left)
    if away is not None:
        assert away.reason
        assert away.code in ("no_capacity", "rate_limit_exceeded")
        assert SHORTEST_S <= away.retry_after <= LONGEST_S


@given(st.sampled_from(list(Tier)), lefts)
def test_nobody_is_turned_away_from_an_empty_line(tier: Tier, left: Left) -> None:
    assert judge(tier, Line(), left) is None


def test_every_tier_has_a_bound() -> None:
    assert set(BOUNDS) == set(Tier)
