"""When an engine is called stalled, and when not."""

from __future__ import annotations

import pytest

from services.clock import ManualClock
from services.engine.protocol import EngineStats
from services.worker.stalls import UNKNOWN_S, StallWatch

LOOK_S = 0.25


class Engine:
    """One that begins a step at `began`; None: it has nothing to do."""

    def __init__(self, p99_s: float = 0.05, steps: int = 100) -> None:
        self.clock = ManualClock()
        self.watch = StallWatch(self.clock)
        self.began: float | None = self.clock.monotonic()
        self.p99_s = p99_s
        self.steps = steps

    def look(self) -> bool:
        in_step = 0.0 if self.began is None else self.clock.monotonic() - self.began
        self.watch.look(EngineStats(steps=self.steps, step_p99_s=self.p99_s, in_step_s=in_step))
        return self.watch.stalled

    def look_for(self, seconds: float) -> float | None:
        """After how long it was called stalled, within so many seconds."""
        started = self.clock.monotonic()
        while self.clock.monotonic() - started < seconds:
            self.clock.advance(LOOK_S)
            if self.look():
                return self.clock.monotonic() - started
        return None


@pytest.mark.parametrize(("p99_s", "after"), [(0.0, 2.0), (0.05, 2.0), (0.2, 2.0), (0.5, 5.0)])
def test_a_step_may_take_2_s_or_10_times_its_p99(p99_s: float, after: float) -> None:
    assert Engine(p99_s).look_for(20.0) == pytest.approx(after + LOOK_S)


def test_the_first_steps_may_take_longer() -> None:
    engine = Engine(steps=3)
    assert engine.look_for(60.0) == pytest.approx(UNKNOWN_S + LOOK_S)


def test_it_ends_with_the_step() -> None:
    engine = Engine()
    assert engine.look_for(5.0)
    engine.began = engine.clock.monotonic() + LOOK_S
    assert engine.look_for(1.0) is None


def test_steps_that_end_are_no_stall_whatever_their_number() -> None:
    """Also of steps that were void because every row was cancelled: they do not count as steps."""
    engine = Engine()
    for _ in range(40):
        engine.began = engine.clock.monotonic()
        assert engine.look_for(0.5) is None


def test_nothing_to_compute_is_no_stall() -> None:
    engine = Engine()
    engine.began = None
    assert engine.look_for(60.0) is None


def test_our_own_standing_still_is_not_held_against_the_engine() -> None:
    engine = Engine()
    engine.look()
    engine.clock.advance(10.0)  # SIGSTOP of the whole process, in the middle of a step
    assert not engine.look()
    assert engine.look_for(5.0) == pytest.approx(1.75), "what is left of 2 s after 0.5 s"
