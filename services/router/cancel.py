"""Cancels of jobs that nobody owns yet: remember, take out of the queue, answer.

A job that this router placed a moment ago needs nothing here: the edge cancels at its owner. Invariants: the job is remembered
before anything is awaited, so that no placement begins after the cancel was heard; every cancel is answered, JetStream or not;
JetStream is asked for few purges at a time, however many clients left at once.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.control import CancelAck, CancelJob
from schemas.errors import BusUnavailable
from schemas.subjects import Subjects
from services.bus.interface import Bus, Msg
from services.bus.typed import answer
from services.bus.work_queue import WorkQueue
from services.clock import Clock
from services.router.cancelled import CancelledJobs
from services.router.tasks import Tasks
from services.router.waiting import Waiting
from services.telemetry.logs import AtMost, fields

MOST_PURGES = 32
"""At once; a cancel beyond them is answered before its purge."""
_log = logging.getLogger(__name__)


class Cancels:
    """Hears `hr.cancel`, as every router does."""

    def __init__(
        self, bus: Bus, subjects: Subjects, queue: WorkQueue, cancelled: CancelledJobs, waiting: Waiting, clock: Clock
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._queue = queue
        self._cancelled = cancelled
        self._waiting = waiting
        self._purging: set[str] = set()
        self._slots = asyncio.Semaphore(MOST_PURGES)
        self._may_log = AtMost(clock.monotonic)
        self._tasks = Tasks()

    def on_cancel(self, cancel: CancelJob, msg: Msg) -> None:
        self._cancelled.add(cancel)
        if cancel.job in self._purging:
            self._answer(cancel, msg, purged=False)  # repeated while the queue is slow
            return
        waits = len(self._purging) >= MOST_PURGES
        if waits:
            self._answer(cancel, msg, purged=False)
        self._purging.add(cancel.job)
        self._tasks.spawn(self._purge(cancel, None if waits else msg), f"cancel {cancel.job}")

    async def finish(self, timeout: float) -> None:
        await self._tasks.finish(timeout)

    async def _purge(self, cancel: CancelJob, msg: Msg | None) -> None:
        """`msg`: to answer afterwards, unless that was done."""
        subject = self._subjects.job(cancel.model, cancel.tier, cancel.lane, cancel.job)
        purged = False
        try:
            async with self._slots:
                purged = await self._queue.purge(subject)
            self._waiting.left(subject)
        except BusUnavailable as error:  # remembered all the same; its TTL takes it out of the queue
            held_back = self._may_log()
            if held_back is not None:
                _log.warning("cancelled jobs may still be in the queue", extra=fields(error=error, held_back=held_back))
        finally:
            self._purging.discard(cancel.job)
        if msg is not None:
            self._answer(cancel, msg, purged=purged)

    def _answer(self, cancel: CancelJob, msg: Msg, *, purged: bool) -> None:
        answer(self._bus, msg, CancelAck(router=self._bus.process, job=cancel.job, purged=purged))
