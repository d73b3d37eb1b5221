"""The fast path: a submit comes as a request, and its answer leaves within the budget. Core NATS only.

Must not await anything of JetStream. Invariants: every submit is answered once, in time; new work never overtakes jobs of its own
or a higher tier that wait; a resume overtakes them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from schemas.job import Job
from schemas.placement import Queue, SubmitAnswer
from services.bus.interface import Bus, Msg
from services.bus.typed import answer
from services.router.dispatch import Dispatcher, Placed, refusal
from services.router.entry import Entry, refused
from services.router.placement import Impossible, Local, Pair, place
from services.router.placement_request import PATIENCE_S, Request
from services.router.resumes import Resumes
from services.router.tasks import Tasks
from services.router.view import View
from services.router.waiting import Waiting

MAX_IN_FLIGHT = 512
"""Placements at once; more are answered *queue* unseen."""


class Submits:
    """`on_queued` is called with the model of a job that was answered *queue*."""

    def __init__(
        self,
        bus: Bus,
        view: View,
        waiting: Waiting,
        dispatcher: Dispatcher,
        resumes: Resumes,
        entry: Entry,
        random: Random,
        within: float,
        on_queued: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._view = view
        self._waiting = waiting
        self._dispatcher = dispatcher
        self._resumes = resumes
        self._entry = entry
        self._random = random
        self._within = within
        self._on_queued = on_queued
        self._tasks = Tasks()

    def on_submit(self, job: Job, msg: Msg) -> None:
        """One submit, of the queue group or to us by name."""
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._answer(job, msg, Queue(router=self._bus.process, reason="busy"))
        else:
            by = asyncio.get_running_loop().time() + self._within
            self._tasks.spawn(self._place(job, msg, by), f"submit {job.job}")

    async def finish(self, timeout: float) -> None:
        """Let the placements in flight end."""
        await self._tasks.finish(timeout)

    async def _place(self, job: Job, msg: Msg, by: float) -> None:
        said = self._held_back(job)
        if said is None:
            patience, within = 0.0 if job.resume else PATIENCE_S, by - asyncio.get_running_loop().time()
            outcome = await self._dispatcher.place(job, within, patience, self._entry.left(job))
            said = outcome.answer if isinstance(outcome, Placed) else outcome
        if job.resume:
            (self._resumes.unplaced if isinstance(said, Queue) else self._resumes.placed)(job)
        self._answer(job, msg, said)

    def _held_back(self, job: Job) -> SubmitAnswer | None:
        """The answer to a job that must wait its turn; None when it may be placed now."""
        if job.resume:
            return None
        away = self._entry.enter(job)
        if away is not None:
            return refused(away)
        request, now, pools = Request.of(job), self._view.now(), self._view.pools(job.model)
        free = self._resumes.left_for(job.model, job.tier, pools)
        taken = len(free) < len(pools) and not isinstance(place(free, request, now, self._random), Pair | Local)
        if not taken and not self._waiting.ahead_of(job.model, job.tier):
            return None
        decision = place(pools, request, now, self._random)
        if isinstance(decision, Impossible):
            return refusal(decision.error)  # waiting cannot help it
        return Queue(router=self._bus.process, reason="others_wait")

    def _answer(self, job: Job, msg: Msg, said: SubmitAnswer) -> None:
        queued = isinstance(said, Queue) and not job.resume
        if queued:
            self._waiting.expect(job)
        answer(self._bus, msg, said)
        if queued:
            self._on_queued(job.model)
