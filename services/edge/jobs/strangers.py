"""Runs that nobody here wants: each is told to stop, at most once in 100 ms, for as long as it speaks.

Owns the times of the last cancels, and forgets them.
"""

from __future__ import annotations

from services.clock import Clock
from services.edge.jobs.wire import Wire

_MOST = 4096


class Strangers:
    def __init__(self, wire: Wire, clock: Clock, repeat_s: float) -> None:
        self._wire = wire
        self._clock = clock
        self._repeat_s = repeat_s
        self._told: dict[int, float] = {}

    def refuse(self, run: int, job: str, control: str) -> None:
        """`control`: the reply subject of the message; without one there is nobody to tell."""
        now = self._clock.monotonic()
        if not control or now - self._told.get(run, float("-inf")) < self._repeat_s:
            return
        if len(self._told) >= _MOST:
            self._told = {run: at for run, at in self._told.items() if now - at < self._repeat_s}
        self._told[run] = now
        self._wire.cancel_run(control, run, job)
