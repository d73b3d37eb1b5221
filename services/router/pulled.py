"""What becomes of one job that was pulled from the queue: placed, dropped, refused, or given back at once.

Must not choose which job is next. Invariant: the queue forgets a job only when a worker has it, when nobody wants it any more, or
when its edge was told that it can never run. Only the edge says that a queued job expired; a router just does not place it late.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from schemas.errors import BusError, BusUnavailable, Unavailable, UnreadableMessage, from_code
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Accepted, Refused
from schemas.reply import Event, Frames
from services.bus.typed import Refusals, send
from services.bus.work_queue import Item
from services.router.cancelled import CancelledJobs
from services.router.dispatch import Dispatcher
from services.router.drain_rate import DrainRate
from services.router.entry import Entry
from services.router.placement_request import PATIENCE_S
from services.router.waiting import Waiting
from services.telemetry.logs import fields
from services.worker.edges import EdgeWatch

NO_RUN = 0
"""In an event about a job that no worker ever had."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """Settles pulled jobs, one or many at a time."""

    dispatcher: Dispatcher
    cancelled: CancelledJobs
    edges: EdgeWatch
    waiting: Waiting
    drained: DrainRate
    refusals: Refusals
    entry: Entry
    within: float

    async def settle(self, item: Item) -> int | None:
        """Uncached tokens placed, 0 when it was dropped, None when it went back. Raises `BusUnavailable` when it could not."""
        try:
            job = self.dispatcher.bus.dialect.decode(item.data, Job)
        except UnreadableMessage as error:
            self.refusals.refuse(item.subject, error)
            return await self._done(item)
        if self.waiting.subject(job) != item.subject:
            # Whoever chose the subject chose the turn: it must be what the edge says of the job.
            self.refusals.refuse(
                item.subject, UnreadableMessage("a job waits under a tier, lane, model or id that is not its own")
            )
            return await self._done(item)
        if self._unwanted(job):
            return await self._done(item)
        patience = self.edges.remaining(job.edge, job.deadlines, PATIENCE_S)
        outcome = await self.dispatcher.place(job, self.within, patience, self.entry.left(job))
        answer = outcome.answer
        if isinstance(answer, Accepted):
            self.drained.add(job.model)
            self.entry.placed(job)
            return await self._done(item, outcome.why.uncached if outcome.why is not None else 0)
        if job in self.cancelled:
            return await self._done(item)
        if isinstance(answer, Refused) and (answer.code == Unavailable.code or not from_code(answer.code, "").retryable):
            self._tell(job, answer)
            return await self._done(item)
        await item.nak()
        return None

    def _unwanted(self, job: Job) -> bool:
        limit = job.deadlines.queue if job.deadlines.queue is not None else job.deadlines.total
        late = self.edges.remaining(job.edge, job.deadlines, limit) <= 0
        return late or job in self.cancelled or (self.edges.gone(job.edge) and not job.detached)

    async def _done(self, item: Item, tokens: int = 0) -> int:
        try:
            await item.ack()
        except BusUnavailable as error:  # it comes back and may be placed twice: the edge cancels the second run
            _log.warning("a job may come back from the queue", extra=fields(subject=item.subject, error=error))
        self.waiting.left(item.subject)
        return tokens

    def _tell(self, job: Job, refused: Refused) -> None:
        event = Event(
            run=NO_RUN,
            job=job.job,
            attempt=job.attempt,
            hop=0,
            state=State.FAILED,
            reason=refused.reason,
            error_code=refused.code,
            retry_after=refused.retry_after,
        )
        bus = self.dispatcher.bus
        try:
            send(bus, job.reply_to, Frames(process=bus.process, events=(event,)))
        except BusError as error:
            _log.warning("could not tell an edge of a refusal", extra=fields(job=job.job, error=error))
