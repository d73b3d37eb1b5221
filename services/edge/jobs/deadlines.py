"""The deadlines of a job: total, first token, queue. The edge's own clock decides.

Owns their timers. Must not know how a job is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas.errors import DeadlineExceeded, HeadraceError, QueueExpired
from schemas.lifecycle import State
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.ends import WAITED_TOO_LONG
from services.edge.jobs.models import ModelBoard


class Deadlines:
    """`close(job, error)` is called when one passes."""

    def __init__(self, close: Callable[[ActiveJob, HeadraceError], None], board: ModelBoard) -> None:
        self._close = close
        self._board = board

    def set(self, job: ActiveJob, age: float) -> Callable[[], None]:
        """For a job that is `age` seconds old; what it returns calls them off."""
        limits, loop = job.draft.limits, asyncio.get_running_loop()
        timers = (
            loop.call_later(limits.total_s - age, self._total, job),
            loop.call_later(limits.first_token_s - age, self._first_token, job),
            loop.call_later(limits.queue_s - age, self._queue, job),
        )

        def call_off() -> None:
            for timer in timers:
                timer.cancel()

        return call_off

    def _total(self, job: ActiveJob) -> None:
        self._close(job, DeadlineExceeded("The request did not finish in time."))

    def _first_token(self, job: ActiveJob) -> None:
        resumed = job.owned and job.attempt > 1
        if not job.tokens.received() and not resumed:
            self._close(job, DeadlineExceeded("No token was generated in time."))

    def _queue(self, job: ActiveJob) -> None:
        if job.state is State.QUEUED and not job.run:
            self._close(job, QueueExpired(WAITED_TOO_LONG, retry_after=self._board.retry_after(job.draft.model)))
