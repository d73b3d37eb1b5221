"""What was lost on the way, tokens or the end of a run: its owner is asked to repeat it, each 100 ms, until it is here.

Owns the timers of these requests. Invariant: time in which our own connection is down, or has just come back, is not held against
an owner.
"""

from __future__ import annotations

import asyncio

from schemas.errors import InternalError
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire


class Recovery:
    def __init__(self, wire: Wire, timing: Timing) -> None:
        self._wire = wire
        self._timing = timing
        self._active: set[tuple[str, int]] = set()

    def ask(self, job: ActiveJob, delay: float = 0.0) -> None:
        """Something of the current attempt is missing, or will be if it is not here in `delay` seconds."""
        key = (job.id, job.attempt)
        if key in self._active:
            return
        self._active.add(key)
        if delay:
            asyncio.get_running_loop().call_later(delay, self._tick, job, job.attempt, job.tokens.progress, 0.0)
        else:
            self._tick(job, job.attempt, job.tokens.progress, 0.0)

    def _tick(self, job: ActiveJob, attempt: int, received: int, stalled: float) -> None:
        if job.closed or job.attempt != attempt or job.over.done() or not job.tokens.wanting:
            self._active.discard((job.id, attempt))
            return
        if job.tokens.progress > received:
            received, stalled = job.tokens.progress, 0.0
        if stalled >= self._timing.stalled_s:
            self._active.discard((job.id, attempt))
            job.end_attempt(AttemptEnd("gap", InternalError("Tokens were lost and could not be computed again."), alive=True))
            return
        self._wire.replay(job, job.tokens.missing())
        if self._wire.bus.steady_for() >= self._timing.settle_s:
            stalled += self._timing.repeat_s
        asyncio.get_running_loop().call_later(self._timing.repeat_s, self._tick, job, attempt, received, stalled)
