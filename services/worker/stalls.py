"""Whether this worker's engine stands still while this process does not: a step that takes far longer than its steps do.

Looked at every 250 ms by `upkeep`; beats and digests say what it found. Invariants: time in which this process itself stood still
is not held against the engine; an engine with nothing to compute, or that was paused, is never called stalled.
"""

from __future__ import annotations

from services.clock import Clock
from services.engine.protocol import EngineStats

STALL_S = 2.0
TIMES_P99 = 10.0
UNKNOWN_S = 20.0
"""For an engine that has not measured enough steps: the first ones may wait for a compiler or a cold disk."""
FEW_STEPS = 8
_LOOK_S = 0.5
"""The most that one look counts: more means that nobody looked."""


class StallWatch:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked = clock.monotonic()
        self._in_step = 0.0
        self._still = 0.0
        self.stalled = False

    def look(self, stats: EngineStats) -> bool:
        """`stats` as they are now. True when something changed."""
        now = self._clock.monotonic()
        elapsed, self._looked = now - self._looked, now
        if stats.in_step_s < self._in_step or not stats.in_step_s:  # another step than before, or none
            self._still = 0.0
        self._in_step = stats.in_step_s
        self._still = min(self._still + min(elapsed, _LOOK_S), stats.in_step_s)
        before, self.stalled = self.stalled, self._still > limit(stats)
        return self.stalled is not before


def limit(stats: EngineStats) -> float:
    """Seconds that a step may take."""
    return max(STALL_S, TIMES_P99 * stats.step_p99_s) if stats.steps >= FEW_STEPS else UNKNOWN_S
