"""Runs and choices that nobody here wants: each is told to stop, at most once in 100 ms, for as long as it speaks.

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
        self._told: dict[tuple[int, int | None], float] = {}
        self._spared: dict[str, float] = {}

    def spare(self, job: str, seconds: float) -> None:
        """Another edge wants this job, or we may: for so long nobody is told to stop it."""
        now = self._clock.monotonic()
        self._spared = {spared: until for spared, until in self._spared.items() if until > now}
        self._spared[job] = now + seconds

    def refuse(self, run: int, job: str, control: str, choice: int | None = None) -> None:
        """`control`: the reply subject of the message; without one there is nobody to tell. `choice`: it alone, not the run."""
        now, key = self._clock.monotonic(), (run, choice)
        if self._spared and self._spared.get(job, now) > now:
            return
        if not control or now - self._told.get(key, float("-inf")) < self._repeat_s:
            return
        if len(self._told) >= _MOST:
            self._told = {told: at for told, at in self._told.items() if now - at < self._repeat_s}
        self._told[key] = now
        self._wire.cancel_run(control, run, job, None if choice is None else (choice,))
