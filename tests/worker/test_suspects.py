"""The line of suspects at a worker: whose turn it is, and how others get by."""

from __future__ import annotations

import pytest

from services.clock import ManualClock
from services.worker.suspects import KEEP_S, PASS_S, SuspectLine


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def line(clock: ManualClock) -> SuspectLine:
    return SuspectLine(clock)


def test_first_come_first_served(line: SuspectLine, clock: ManualClock) -> None:
    assert not line
    assert line.ask("a")
    assert [line.ask(job) for job in ("b", "c", "a", "c")] == [False, False, True, False]
    line.leave("a")
    assert line
    assert [line.ask(job) for job in ("c", "b")] == [False, True]
    assert line.ask("a") is False, "it comes last now"


def test_who_does_not_ask_is_passed_over_and_keeps_its_place(line: SuspectLine, clock: ManualClock) -> None:
    line.ask("a")
    clock.advance(PASS_S + 0.1)
    assert line.ask("b")
    assert line.ask("a")
    assert not line.ask("b")


def test_who_never_comes_back_is_forgotten(line: SuspectLine, clock: ManualClock) -> None:
    line.ask("a")
    clock.advance(KEEP_S + 0.1)
    assert not line
