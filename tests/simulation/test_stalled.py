"""An engine that stands still in a process that is well: its runs begin again elsewhere, and it gets no new ones."""

from __future__ import annotations

import pytest

from tests.simulation.plan import FIRST_S, Fault
from tests.simulation.simulate import play
from tests.simulation.stories import story

AT = 3.0


@pytest.mark.parametrize("lasts", [4.0, 10.0])
def test_decode_stands_still(lasts: float) -> None:
    """2 s of the engine, 250 ms of each of watch and digest; then another attempt."""
    result = play(story(Fault(AT, "stall", "d1", lasts=lasts)))
    assert result.outcomes == {"finished": 4}
    assert max(result.pauses) < 3.2
    assert max(result.attempts) == 2


def test_nobody_new_is_placed_there() -> None:
    late = [FIRST_S, FIRST_S, *(AT + 3.0 + 0.1 * n for n in range(8))]
    result = play(story(Fault(AT, "stall", "d1", lasts=12.0), clients=10, at=late))
    assert result.outcomes == {"finished": 10}
    assert set(result.attempts[2:]) == {1}


def test_a_short_stop_is_none() -> None:
    result = play(story(Fault(AT, "stall", "d1", lasts=1.5)))
    assert result.outcomes == {"finished": 4}
    assert set(result.attempts) == {1}


def test_the_last_of_a_pool_is_kept() -> None:
    """Its runs begin again, and end up where they were: nobody fails."""
    result = play(story(Fault(AT, "stall", "d1", lasts=6.0), decode=1))
    assert result.outcomes == {"finished": 4}
    assert max(result.pauses) < 8.0


def test_prefill_stands_still() -> None:
    """Its first eight prompts tell it how long a step takes."""
    times = [FIRST_S + 0.1 * n for n in range(24)]
    result = play(story(Fault(AT, "stall", "p1", lasts=8.0), clients=24, tokens=10, at=times))
    assert result.outcomes == {"finished": 24}
