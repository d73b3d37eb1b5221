from __future__ import annotations

from services.router.breaker import FAILURES, HEALED, OPEN_S, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.outcome(False, now)
    return breaker


def test_a_few_failures_among_many_successes_are_nothing() -> None:
    breaker = Breaker()
    for number in range(200):
        breaker.outcome(number % 3 > 0, 0.0)
        assert not breaker.bars(0.0, 0)


def test_failures_open_it_for_a_while() -> None:
    breaker = Breaker()
    assert [breaker.outcome(False, 0.0) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert breaker.bars(0.0, 0)
    assert breaker.bars(OPEN_S - 0.1, 0)
    assert not breaker.bars(OPEN_S, 0)


def test_it_comes_back_with_one_that_doubles_on_success() -> None:
    breaker, now, allowance = opened(), OPEN_S, 1
    while allowance <= HEALED:
        assert not breaker.bars(now, allowance - 1)
        assert breaker.bars(now, allowance)
        breaker.outcome(True, now)
        allowance *= 2
    assert not breaker.bars(now, 10_000), "closed"


def test_a_failure_on_the_way_back_opens_it_for_twice_as_long() -> None:
    breaker = opened()
    breaker.outcome(True, OPEN_S)
    breaker.outcome(False, OPEN_S)
    assert breaker.bars(3 * OPEN_S - 0.1, 0)
    assert not breaker.bars(3 * OPEN_S, 0)
    assert breaker.bars(3 * OPEN_S, 1), "and it begins with one again"


def test_answers_to_what_was_asked_before_it_opened_mean_nothing() -> None:
    breaker = opened()
    for ok in (True, False, True):
        breaker.outcome(ok, OPEN_S / 2)
    assert not breaker.bars(OPEN_S, 0)
    assert breaker.bars(OPEN_S, 1)
