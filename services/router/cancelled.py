"""Jobs that were cancelled before anybody owned them, remembered until their queue deadline.

Knows no bus. Invariant: a remembered job is not placed by this router, whichever way it comes.
"""

from __future__ import annotations

import heapq

from schemas.control import CancelJob
from schemas.job import Job
from services.clock import Clock


class CancelledJobs:
    """`job in cancelled` is true when the attempt the edge cancelled, or an earlier one, is asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._attempts: dict[str, int] = {}
        self._until: list[tuple[float, str]] = []

    def add(self, cancel: CancelJob) -> None:
        """Remember it. Cancels are repeated until answered: the highest attempt counts, the first deadline stands."""
        self._forget_old()
        if cancel.job not in self._attempts:
            heapq.heappush(self._until, (self._clock.monotonic() + cancel.remember_s, cancel.job))
        self._attempts[cancel.job] = max(cancel.attempt, self._attempts.get(cancel.job, 0))

    def __contains__(self, job: Job) -> bool:
        self._forget_old()
        return job.attempt <= self._attempts.get(job.job, 0)

    def __len__(self) -> int:
        self._forget_old()
        return len(self._attempts)

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        while self._until and self._until[0][0] <= now:
            del self._attempts[heapq.heappop(self._until)[1]]
