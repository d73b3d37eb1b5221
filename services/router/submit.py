"""The fast path: a submit comes as a request, and its answer leaves within the budget. Core NATS only.

Must not await anything of JetStream. Invariants: every submit is answered once, in time; new work never overtakes jobs of its own
or a higher tier that wait; a resume overtakes them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from schemas.job import Job
from schemas.placement import Queue, Refused, SubmitAnswer
from services.bus.interface import Bus, Msg
from services.bus.typed import answer
from services.router.admission import Stays
from services.router.choice import refused
from services.router.dispatch import Dispatcher, Outcome
from services.router.entry import Entry
from services.router.explain import Explainer
from services.router.placement_request import PATIENCE_S
from services.router.precedence import Precedence
from services.router.resumes import Resumes
from services.router.tasks import Tasks
from services.router.waiting import Waiting

MAX_IN_FLIGHT = 512
"""Placements at once; more are answered *queue* unseen."""


class Submits:
    """`on_queued` is called with the model of a job that was answered *queue*."""

    def __init__(
        self,
        bus: Bus,
        waiting: Waiting,
        dispatcher: Dispatcher,
        resumes: Resumes,
        entry: Entry,
        precedence: Precedence,
        explainer: Explainer,
        within: float,
        on_queued: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._waiting = waiting
        self._dispatcher = dispatcher
        self._resumes = resumes
        self._entry = entry
        self._precedence = precedence
        self._explainer = explainer
        self._within = within
        self._on_queued = on_queued
        self._placing: dict[str, Job] = {}
        self._tasks = Tasks()

    def on_submit(self, job: Job, msg: Msg) -> None:
        """One submit, of the queue group or to us by name."""
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._answer(job, msg, Queue(router=self._bus.process, reason="busy"))
        else:
            self._placing[job.job] = job
            by = asyncio.get_running_loop().time() + self._within
            task = self._tasks.spawn(self._place(job, msg, by), f"submit {job.job}")
            task.add_done_callback(lambda _: self._placing.pop(job.job, None))

    def placing(self) -> list[Job]:
        """Those that have no answer yet."""
        return list(self._placing.values())

    async def finish(self, timeout: float) -> None:
        """Let the placements in flight end."""
        await self._tasks.finish(timeout)

    async def _place(self, job: Job, msg: Msg, by: float) -> None:
        sight = self._explainer.look(job) if job.explain else None
        outcome = self._held_back(job)
        if outcome is None:
            patience, within = 0.0 if job.resume else PATIENCE_S, by - asyncio.get_running_loop().time()
            outcome = await self._dispatcher.place(job, within, patience, self._entry.left(job))
        said = outcome.answer
        if job.resume:
            (self._resumes.unplaced if isinstance(said, Queue) else self._resumes.placed)(job)
        if sight is not None:
            said = replace(said, explanation=self._explainer.tell(sight, outcome))
        self._answer(job, msg, said)

    def _held_back(self, job: Job) -> Outcome | None:
        """What becomes of a job that must wait its turn; None when it may be placed now."""
        if job.resume:
            return None
        away = self._entry.enter(job)
        if away is not None:
            return Outcome(refused(away))
        match self._precedence.others_first(job):
            case Stays(reason=reason):
                return Outcome(Queue(router=self._bus.process, reason=reason))
            case Refused() as never:
                return Outcome(never)
        return None

    def _answer(self, job: Job, msg: Msg, said: SubmitAnswer) -> None:
        queued = isinstance(said, Queue) and not job.resume
        if queued:
            self._waiting.expect(job)
        answer(self._bus, msg, said)
        if queued:
            self._on_queued(job.model)
