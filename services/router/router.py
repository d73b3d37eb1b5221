"""One router, composed: who hears what, what runs beside it, and the order in which it begins and ends.

Owns the subscriptions and the background tasks; each part owns its own rules. Invariant: it is in the queue group only while
it sees the workers and is not draining: it joins after it listened for a while, and leaves before anything else ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

from schemas.admin import WorkerQuestion
from schemas.control import CancelJob
from schemas.errors import NotFound, UnreadableMessage
from schemas.job import Job
from schemas.kvevents import KvEvents
from schemas.state import Cause, Death, EdgeBeat, QueueReport, WorkerState
from schemas.subjects import Subjects
from services.bus import advisories
from services.bus.deaths import announce
from services.bus.interface import Bus, Msg, Subscription
from services.bus.questions import read
from services.bus.typed import Refusals, listen
from services.bus.work_queue import WorkQueue
from services.clock import Clock
from services.router.cancel import Cancels
from services.router.cancelled import CancelledJobs
from services.router.disconnects import Disconnects
from services.router.dispatch import Dispatcher
from services.router.drain_rate import DrainRate
from services.router.entry import Entry
from services.router.explain import Explainer
from services.router.held import Held
from services.router.kv_feed import KvFeed
from services.router.precedence import Precedence
from services.router.prefix_index import PrefixIndex
from services.router.pulled import Pulled
from services.router.queue import QueuePath
from services.router.report import Reporter
from services.router.resumes import Resumes
from services.router.status import Status, status
from services.router.submit import Submits
from services.router.tasks import Tasks
from services.router.view import View
from services.router.waiting import Waiting
from services.settings.settings import Settings
from services.worker.edges import EdgeWatch

GROUP = "routers"
UPKEEP_S = 1.0
CLEAR_S = 0.02
M = TypeVar("M")


class Router:
    """`listen`, then `join`; `leave` and `join` again as an operator wants it; then `drain`."""

    def __init__(self, bus: Bus, queue: WorkQueue, settings: Settings, clock: Clock, random: Random, refusals: Refusals) -> None:
        subjects = Subjects(settings.nats.prefix)
        within = settings.router.answer_within_s
        self._bus = bus
        self._subjects = subjects
        self._refusals = refusals
        self._drain_s = settings.router.drain_timeout_s
        self._account = settings.nats.account
        self.view = View(clock, bus)
        self.waiting = Waiting(bus.process, subjects, clock)
        self.edges = EdgeWatch(bus, clock)
        self.disconnects = Disconnects(bus, clock, self._on_away)
        self.drained = DrainRate(clock)
        self.index = PrefixIndex()
        self._tasks = Tasks()
        self.feed = KvFeed(bus, subjects, self.index, self._tasks.spawn)
        cancelled = CancelledJobs(clock)
        resumes = Resumes(clock)
        self.entry = Entry(self.waiting, self.edges, clock)
        precedence = Precedence(self.view, self.waiting, resumes, random)
        self.explainer = Explainer(bus.process, self.view, self.index, self.entry, precedence, clock, random)
        dispatcher = Dispatcher(bus, subjects, self.view, self.index, cancelled, random)
        pulled = Pulled(dispatcher, cancelled, self.edges, self.waiting, self.drained, refusals, self.entry, within)
        poll_s = settings.router.queue_poll_s
        self.queue_path = QueuePath(
            queue, subjects, self.view, self.waiting, pulled, precedence, self.entry, clock, random, poll_s
        )
        self.submits = Submits(
            bus, self.waiting, dispatcher, resumes, self.entry, precedence, self.explainer, within, self.queue_path.wake
        )
        self.held = Held(bus, subjects, self.submits, self.waiting, self.edges)
        self.cancels = Cancels(bus, subjects, queue, cancelled, self.waiting, clock)
        self.reporter = Reporter(bus, subjects, self.view, self.waiting, self.drained, clock, settings.served_names)
        self._group: list[Subscription] = []
        self._reporting: asyncio.Task[object] | None = None
        self._moving = asyncio.Lock()
        self._heard: list[Subscription] = []

    async def listen(self) -> None:
        """Hear workers, edges, other routers and cancels; count the queue. Raises `Disconnected`."""
        subjects = self._subjects
        await self._hear(subjects.worker_state_any(), WorkerState, self._on_worker)
        await self._hear(subjects.kv_events_any(), KvEvents, self.feed.on_events)
        await self._hear(subjects.edge_state_any(), EdgeBeat, self._on_edge)
        await self._hear(subjects.dead_any(), Death, self._on_death)
        await self._hear(subjects.queue_any(), QueueReport, self._on_report)
        await self._hear(subjects.cancel(), CancelJob, self.cancels.on_cancel)
        if self._account:
            await self._advised(advisories.disconnected(self._account), self.disconnects.ended)
            await self._advised(advisories.connected(self._account), self.disconnects.heard)
        self._tasks.spawn(self.queue_path.poll(), "count the queue")
        self._tasks.spawn(self._upkeep(), "upkeep")
        self._tasks.spawn(self._clear(), "clear the prefix index")

    async def join(self) -> None:
        """Take submits and what waits, and say so. Raises `Disconnected`."""
        async with self._moving:
            if self._group:
                return
            on_submit = self.submits.on_submit
            by_name = self._subjects.router_submit(self._bus.process)
            self._group = [
                await listen(self._bus, self._subjects.submit_any(), Job, on_submit, queue=GROUP, refusals=self._refusals),
                await listen(self._bus, by_name, Job, on_submit, refusals=self._refusals),
            ]
            self.queue_path.begin()
            # Not before: an edge is ready when it hears a model's card.
            self._reporting = self._tasks.spawn(self.reporter.run(), "report")

    async def leave(self) -> None:
        """Say no more that jobs can be placed here, take none, let what is in hand end. Cancels are answered all the same."""
        async with self._moving:
            if self._reporting is not None:
                self._reporting.cancel()
            group, self._group = self._group, []
            await asyncio.gather(*(subscription.drain(self._drain_s) for subscription in group))
            await asyncio.gather(*(part.finish(self._drain_s) for part in (self.submits, self.queue_path)))

    async def drain(self) -> None:
        """Leave, then stop. The bus stays open: it is its owner's."""
        await self.leave()
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._heard))
        await self.cancels.finish(self._drain_s)  # none begins any more
        await self._tasks.cancel()

    def status(self) -> Status:
        """What an operator asks for."""
        return status(self._bus, not self._group, self.view, self.waiting, self.drained)

    def eject(self, data: bytes, ejected: bool) -> Status:
        """What an operator says of one worker, as a `WorkerQuestion`. Raises `UnreadableMessage`, `NotFound`."""
        worker = read(data, WorkerQuestion).worker
        if not self.view.eject(worker, ejected):
            raise NotFound(f"no worker {worker[:64]!r} is known")
        return self.status()

    async def _hear(self, subject: str, kind: type[M], handler: Callable[[M, Msg], None]) -> None:
        self._heard.append(await listen(self._bus, subject, kind, handler, refusals=self._refusals))

    async def _advised(self, subject: str, then: Callable[[str], None]) -> None:
        """Call `then` with each process that the server names on `subject`."""

        def receive(msg: Msg) -> None:
            try:
                process = advisories.process_of(msg.data)
            except UnreadableMessage as error:
                self._refusals.refuse(msg.subject, error)
                return
            if process:
                then(process)

        self._heard.append(await self._bus.subscribe(subject, receive))

    def _on_worker(self, state: WorkerState, _: Msg) -> None:
        self._bus.dialect.hear(state.process, state.schemas)
        self.disconnects.heard(state.process)
        new = state.model not in self.view.models()
        for process in self.view.observe(state):
            self.feed.forget(process)
            self._tasks.spawn(announce(self._bus, self._subjects, process, Cause.REPLACED), f"death of {process}")
        if new and self._group:
            self.reporter.say(state.model)
        self.queue_path.wake(state.model)

    def _on_death(self, death: Death, _: Msg) -> None:
        self.view.died(death.process, death.cause)
        if death.cause is not Cause.DISCONNECTED:
            self.feed.forget(death.process)
            self._bus.dialect.gone(death.process)
            self.edges.died(death.process)
            self.disconnects.died(death.process)

    def _on_edge(self, beat: EdgeBeat, _: Msg) -> None:
        self._bus.dialect.hear(beat.process, beat.schemas)
        if beat.left:
            self._bus.dialect.gone(beat.process)
        self.disconnects.heard(beat.process)
        self.edges.beat(beat)

    def _on_report(self, report: QueueReport, _: Msg) -> None:
        self._bus.dialect.hear(report.router, report.schemas)
        self.disconnects.heard(report.router)
        self.waiting.heard(report)

    def _on_away(self, process: str) -> None:
        """A worker's connection ended, and it did not come back. Of others nobody needs to hear before they are silent."""
        if process in self.view:
            away = announce(self._bus, self._subjects, process, Cause.DISCONNECTED, lambda: self.disconnects.away(process))
            self._tasks.spawn(away, f"{process} is away")

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            self.view.forget_old()
            for process in self.feed.processes:
                if process not in self.view:
                    self.feed.forget(process)
            self.waiting.forget_old()
            self.edges.sweep()
            self.disconnects.forget_old()

    async def _clear(self) -> None:
        while True:
            await asyncio.sleep(CLEAR_S)
            self.index.clear_some()
