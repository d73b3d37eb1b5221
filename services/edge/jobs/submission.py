"""One attempt on its way to a worker: by a router, or by the work queue when the router says so.

Owns nothing. Invariant: an attempt is submitted to one router only; whoever might have taken it without our hearing of it is left
to its attempt number.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.errors import (
    BusUnavailable,
    Disconnected,
    HeadraceError,
    MessageTooLarge,
    ModelLoading,
    NobodyListens,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
    UnreadableMessage,
    from_code,
)
from schemas.lifecycle import State, advance
from schemas.placement import NO_WORKER, Accepted, Queue, Refused, SubmitAnswer
from services.bus.typed import ask
from services.bus.work_queue import Put, WorkQueue
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.explained import told
from services.edge.jobs.message import job_message
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.outage import Outage
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire
from services.telemetry.logs import AtMost

_log = logging.getLogger("headrace.edge")
QUEUE_UNREACHABLE, NO_BUS = "queue_unreachable", "no_bus"
"""Attempts that ended because nobody could keep, or hear of, them: how often says nothing, how long does."""
_RETRY_S = 1.0
_NO_CAPACITY = "No worker can take this request now."
_TOO_LARGE = "The request is too large."
_NO_BUS = "The service is reconnecting."


class Submission:
    def __init__(self, wire: Wire, queue: WorkQueue, board: ModelBoard, timing: Timing) -> None:
        self._wire = wire
        self._queue = queue
        self._board = board
        self._timing = timing
        self._outage = Outage(timing.queue_s)
        self._may_log = AtMost(_now)

    async def place(self, job: ActiveJob, router: str = "") -> AttemptEnd | None:
        """Submit the current attempt, to `router` or to whichever comes first. None: somebody has it now."""
        subjects = self._wire.subjects
        subject = subjects.router_submit(router) if router else subjects.submit(job.draft.model)
        message = job_message(job)
        job.submitted = True
        try:
            answer: SubmitAnswer = await ask(self._wire.bus, subject, message, SubmitAnswer, timeout=self._timing.submit_s)
        except MessageTooLarge:
            return AttemptEnd("too_large", PayloadTooLarge(_TOO_LARGE), final=True)
        except (NoResponders, Disconnected, RequestTimeout, UnreadableMessage) as error:
            return None if job.run else self._unanswered(job, error)  # a worker was faster than its router
        job.explanation = job.explanation or told(answer.explanation, job.draft.explain)
        match answer:
            case Accepted():
                self._accepted(job, answer)
                return None
            case _ if job.run:
                return None  # the submit was delivered twice, and the other one was accepted
            case Queue() if answer.reason == NO_WORKER and job.draft.elsewhere and not job.admitted:
                return AttemptEnd("no_worker", ModelLoading(_NO_CAPACITY), final=True)
            case Queue() if not job.owned:
                return await self._enqueue(job, self._wire.bus.dialect.encode(message))
            case Queue():
                return AttemptEnd("no_credit", self._no_capacity(job))
            case Refused():
                return self._refused(job, answer)

    def _accepted(self, job: ActiveJob, answer: Accepted) -> None:
        if job.adopts(job.attempt, answer.run):
            for hop, process in ((1, answer.prefill), (2, answer.decode)):
                if process:
                    job.processes.setdefault(hop, process)

    async def put_again(self, job: ActiveJob) -> bool:
        """A job that waits, into a queue that may have lost it. False when the queue cannot be reached, or is full."""
        try:
            return await self._put(job, self._wire.bus.dialect.encode(job_message(job))) is not Put.FULL
        except HeadraceError as error:
            self._out_of_reach(error)
            return False

    async def _put(self, job: ActiveJob, data: bytes) -> Put:
        draft, attempt = job.draft, job.attempt
        headers = {
            "tier": draft.tier.value,
            "lane": str(draft.lane),
            "deadline": f"{job.queue_deadline:.3f}",
            "attempt": str(attempt),
            "edge": self._wire.bus.process,
        }
        subject = self._wire.subjects.job(draft.model, draft.tier, draft.lane, job.id)
        put = await self._queue.put(subject, data, msg_id=f"{job.id}.{attempt}", ttl_s=draft.limits.queue_s, headers=headers)
        self._outage.worked()
        if job.attempt == attempt:
            job.queued_at = _now()
        return put

    async def _enqueue(self, job: ActiveJob, data: bytes) -> AttemptEnd | None:
        """A queue that cannot be reached may only elect a new leader: nobody is refused before `Timing.queue_s`.

        An attempt that the queue may hold stays the same one, and is put again; else a router is asked: there may be credit.
        """
        job.state = advance(job.state, State.QUEUED)
        may_hold = False
        while not (job.run or job.over.done()):
            try:
                return self._full(job) if await self._put(job, data) is Put.FULL else None
            except MessageTooLarge:
                return AttemptEnd("too_large", PayloadTooLarge(_TOO_LARGE), final=True)
            except HeadraceError as error:
                may_hold = may_hold or not isinstance(error, NobodyListens)
                given_up = self._out_of_reach(error)
            if (given_up or not may_hold) and not job.run:
                unavailable = Unavailable("The queue cannot be reached now.", retry_after=_RETRY_S)
                return AttemptEnd(QUEUE_UNREACHABLE, unavailable, final=given_up, alive=may_hold)
            await asyncio.sleep(self._timing.repeat_s)
        return None

    def _out_of_reach(self, error: HeadraceError) -> bool:
        """Whether the queue has been so for longer than our patience."""
        if self._may_log() is not None:
            _log.warning("the queue cannot be reached: %s", error.message)
        return self._outage.failed(_now())

    def _full(self, job: ActiveJob) -> AttemptEnd:
        retry_after = self._board.retry_after(job.draft.model)
        return AttemptEnd("queue_full", Overloaded("The queue is full.", retry_after=retry_after), final=True)

    def _unanswered(self, job: ActiveJob, error: HeadraceError) -> AttemptEnd:
        """What NATS tells at once may be over in a moment: routers, or we, may only have lost our server and find another."""
        fresh = not job.owned
        if isinstance(error, NoResponders):
            return AttemptEnd("no_router", self._no_capacity(job), final=fresh and not self._board.routers(job.draft.model))
        if isinstance(error, Disconnected):
            down = self._wire.bus.down_for() > self._timing.reconnect_s
            return AttemptEnd(NO_BUS, BusUnavailable(_NO_BUS, retry_after=_RETRY_S), final=fresh and down)
        return AttemptEnd("router_silent", self._no_capacity(job), alive=True)

    def _refused(self, job: ActiveJob, answer: Refused) -> AttemptEnd:
        text = answer.reason if answer.retry_after is not None else _NO_CAPACITY
        error = from_code(answer.code, text, retry_after=answer.retry_after)
        if not error.retryable:
            error = from_code(answer.code, answer.reason)
        elif error.retry_after is None:
            error.retry_after = self._board.retry_after(job.draft.model)
        return AttemptEnd("refused", error, final=not (job.owned and error.retryable))

    def _no_capacity(self, job: ActiveJob) -> Unavailable:
        return Unavailable(_NO_CAPACITY, retry_after=self._board.retry_after(job.draft.model))


def _now() -> float:
    return asyncio.get_running_loop().time()
