"""The jobs of one edge, for operators: which it answers for, and the end of one of them, everywhere.

Owns nothing; sees the supervisor's table. Invariant: a job that an operator ended is never resumed, and its client is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from schemas.admin import CancelAnswer, HeldJob
from schemas.errors import Cancelled, HeadraceError, NotFound
from schemas.lifecycle import State
from services.clock import Clock
from services.edge.jobs.active import ActiveJob
from services.telemetry.logs import fields

_log = logging.getLogger("headrace.edge")


class Held:
    """`close` ends a job for its client, and has its compute cancelled until that is confirmed."""

    def __init__(
        self, jobs: Mapping[str, ActiveJob], close: Callable[[ActiveJob, HeadraceError | None], None], edge: str, clock: Clock
    ) -> None:
        self._jobs = jobs
        self._close = close
        self._edge = edge
        self._clock = clock
        self.on_unheld: Callable[[str], object] = _not_ours
        """Called with a job that is not here and that an operator ended."""

    def jobs(self) -> list[HeldJob]:
        """Those whose compute may not have ended."""
        return [self._row(job) for job in self._jobs.values()]

    def cancel(self, name: str) -> CancelAnswer:
        """Raises `NotFound`."""
        job = self._jobs.get(name)
        if job is None or job.closed:
            raise NotFound(f"There is no job {name[:64]!r} here.")
        self.end(job)
        return CancelAnswer(job=name)

    def ended(self, name: str) -> None:
        """An operator ended it, at another process."""
        job = self._jobs.get(name)
        if job is None:
            self.on_unheld(name)
        else:
            self.end(job)

    def end(self, job: ActiveJob) -> None:
        """What is detached ends as its caller's own cancel does: that is how its readers are told."""
        if not job.closed:
            _log.info("an operator cancelled a job", extra=fields(job=job.id))
            own = job.detached and job.admitted
            self._close(job, None if own else Cancelled("This request was cancelled by an operator."))

    def _row(self, job: ActiveJob) -> HeldJob:
        draft = job.draft
        return HeldJob(
            job=job.id,
            state=State.CANCELLED if job.closed else job.state,
            model=draft.model,
            tier=draft.tier,
            lane=draft.lane,
            attempt=job.attempt,
            age_s=round(job.age(self._clock.wall()), 3),
            run=f"{job.run:016x}" if job.run else "",
            worker=job.in_charge,
            edge=self._edge,
        )


def _not_ours(_: str) -> None:
    """Some other edge's."""
