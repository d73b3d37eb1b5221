"""A worker whose connection ends and does not come back: what the server says of it is acted on, unless it is the bus."""

from __future__ import annotations

import pytest

from tests.simulation.plan import Fault
from tests.simulation.simulate import play
from tests.simulation.stories import story

AT = 3.0
"""Every client has some tokens, none has all."""


@pytest.mark.parametrize("lasts", [2.0, 8.0])
def test_its_runs_begin_again_elsewhere_before_it_is_silent(lasts: float) -> None:
    result = play(story(Fault(AT, "disconnect", "d1", lasts=lasts)))
    assert result.outcomes == {"finished": 4}
    assert max(result.pauses) < 1.2, "500 ms, then another attempt"
    assert set(result.attempts) == {1, 2}


def test_a_short_break_is_none() -> None:
    result = play(story(Fault(AT, "disconnect", "d1", lasts=0.3)))
    assert result.outcomes == {"finished": 4}
    assert set(result.attempts) == {1}


def test_several_at_once_are_the_bus() -> None:
    """A third of those that a router hears, its own voice included, within a second."""
    three = [Fault(AT + 0.1 * n, "disconnect", name, lasts=2.0) for n, name in enumerate(("d1", "p1", "d2"))]
    result = play(story(*three))
    assert result.outcomes == {"finished": 4}
    assert set(result.attempts) == {1}


def test_a_server_that_is_restarted_disconnects_everybody() -> None:
    result = play(story(Fault(AT, "nats_down", lasts=2.0)))
    assert result.outcomes == {"finished": 4}
    assert set(result.attempts) == {1}


def test_the_last_of_a_pool_gets_its_jobs_back() -> None:
    result = play(story(Fault(AT, "disconnect", "d1", lasts=2.0), decode=1))
    assert result.outcomes == {"finished": 4}
    assert max(result.pauses) < 3.0


def test_it_is_no_death() -> None:
    """Three in a row, and the job is neither refused nor computed alone."""
    faults = [Fault(AT + 1.5 * n, "disconnect", f"d{n % 3 + 1}", lasts=1.2) for n in range(4)]
    result = play(story(*faults, decode=3, tokens=200))
    assert result.outcomes == {"finished": 4}
