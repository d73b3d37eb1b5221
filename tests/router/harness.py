"""Routers, workers, one edge and a queue in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from schemas.codec import encode
from schemas.control import CancelAck, CancelJob
from schemas.errors import BusUnavailable
from schemas.job import Job
from schemas.placement import Accepted, Queue, Refused, SubmitAnswer
from schemas.reply import Event, Frames
from schemas.state import QueueReport, Role
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.memory_queue import MemoryItem, MemoryWorkQueue
from services.bus.typed import Refusals, ask, listen
from services.bus.work_queue import Put
from services.clock import SystemClock
from services.router.router import Router
from services.settings.router import RouterSettings
from services.settings.settings import Settings
from tests.router.fakes import EDGE, MODEL, SUBJECTS, FakeWorker, a_process, a_worker
from tests.waiting import PATIENCE_S, until

EDGE_WAITS_S = 0.6
"""Twice what a real edge waits, because a busy test machine is slow; eight silent workers in a row would take 0.8 s."""
_NUMBERS = itertools.count(1)


class CountedQueue(MemoryWorkQueue):
    """Counts how often somebody looked into it. While `headless` it takes and counts jobs, as with a consumer without a leader,
    but gives none."""

    pulls = 0
    headless = False

    async def pull(self, subject_filter: str, durable: str) -> MemoryItem | None:
        self.pulls += 1
        if self.headless:
            raise BusUnavailable("no answer to a pull")
        return await super().pull(subject_filter, durable)


@dataclass
class House:
    """`poll_s`: how often its routers count the queue."""

    poll_s: float = 0.1
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    queue: CountedQueue = field(default_factory=CountedQueue)
    refusals: Refusals = field(default_factory=Refusals)
    routers: list[Router] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    reports: list[QueueReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.edge = MemoryBus(self.broker, EDGE)

    async def open(self) -> None:
        await listen(
            self.edge, SUBJECTS.reply(EDGE), Frames, lambda frames, _: self.events.extend(frames.events), refusals=Refusals()
        )
        await listen(
            self.edge, SUBJECTS.queue_any(), QueueReport, lambda report, _: self.reports.append(report), refusals=Refusals()
        )

    async def router(self) -> Router:
        bus = MemoryBus(self.broker, a_process("router"))
        settings = Settings(model=MODEL, router=RouterSettings(queue_poll_s=self.poll_s))
        router = Router(bus, self.queue, settings, SystemClock(), Random(len(self.routers)), self.refusals)
        self.routers.append(router)
        await router.listen()
        await router.join()
        return router

    async def workers(self, *roles: Role, **changes: object) -> list[FakeWorker]:
        """Workers that every router already sees."""
        made = [await a_worker(self.broker, f"w{next(_NUMBERS)}", role, **changes) for role in roles]
        await until(
            lambda: all(
                any(seen.process == worker.process for seen in router.view.workers(worker.model))
                for worker in made
                for router in self.routers
            )
        )
        return made

    async def submit(self, job: Job, timeout: float = PATIENCE_S) -> SubmitAnswer:
        answer = await ask(self.edge, SUBJECTS.submit(job.model), job, SubmitAnswer, timeout=timeout)
        assert isinstance(answer, Accepted | Queue | Refused)
        return answer

    def subject(self, job: Job) -> str:
        return SUBJECTS.job(job.model, job.tier, job.lane, job.job)

    async def put(self, *jobs: Job) -> None:
        for job in jobs:
            assert (
                await self.queue.put(self.subject(job), encode(job), msg_id=f"{job.job}.{job.attempt}", ttl_s=30.0) is Put.QUEUED
            )

    async def empty(self) -> bool:
        """True when nothing is queued."""
        return not await self.queue.waiting(SUBJECTS.jobs())

    async def queued(self) -> set[str]:
        return set(await self.queue.waiting(SUBJECTS.jobs()))

    async def cancel(self, job: Job) -> list[CancelAck]:
        """What the routers answer to one cancel, one answer each."""
        acks: list[CancelAck] = []
        inbox = self.edge.new_inbox()
        hearing = await listen(self.edge, inbox, CancelAck, lambda ack, _: acks.append(ack), refusals=Refusals())
        self.edge.publish(SUBJECTS.cancel(), encode(a_cancel(job)), reply=inbox)
        await until(lambda: len(acks) >= len(self.routers))
        await hearing.unsubscribe()
        return acks


async def eventually(question: Callable[[], Awaitable[bool]], timeout: float = PATIENCE_S) -> None:
    """`until`, for a condition that has to be asked for. Raises AssertionError after `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not await question():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout} s"
        await asyncio.sleep(0.005)


def a_cancel(job: Job) -> CancelJob:
    return CancelJob(job=job.job, attempt=job.attempt, model=job.model, tier=job.tier, lane=job.lane, remember_s=30.0)


@asynccontextmanager
async def a_house(routers: int = 1, poll_s: float = 0.1) -> AsyncIterator[House]:
    house = House(poll_s)
    await house.open()
    try:
        for _ in range(routers):
            await house.router()
        yield house
    finally:
        for router in house.routers:
            await router.drain()
