"""Two edges over one SQLite file; the test plays the router (`Cluster`) and the worker that owns a job (`Owner`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa

from schemas.codec import decode, encode
from schemas.control import Control, Verb
from schemas.job import Job, Sampling
from schemas.lifecycle import State
from schemas.reply import OWNED, Digest, DigestEntry, Event, FinishReason, Frame, Frames
from services.bus.interface import Msg
from services.bus.memory import MemoryBus
from services.clock import SystemClock
from services.edge.detached.jobs import DetachedJobs
from services.edge.detached.keeper import nothing
from services.edge.detached.reader import DetachedReader
from services.edge.detached.timing import DetachedTiming
from services.edge.gate.records import Bill
from services.edge.jobs.draft import Draft
from services.edge.jobs.supervisor import Supervisor
from services.edge.jobs.timing import Timing
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from services.edge.store.migrate import migrate
from services.edge.store.records import JobState, StoredJob
from services.telemetry.metrics import Metrics
from tests.edge.cluster import DECODE, FAST, Cluster, draft, process
from tests.waiting import PATIENCE_S, until

TENANT = "t"
TOTAL_S = 120.0
RUN = 7
CACHED = 1
"""Prompt tokens, as every owner says."""
TOKEN_S = 0.25
"""What an owner says that a token took to compute."""
SECOND = process("edge2")
QUICK = DetachedTiming(
    lease_s=2.0, checkpoint_s=0.05, attach_s=0.2, watch_s=0.02, adopt_s=0.1, poll_s=0.05, cut_off_s=0.5, sweep_s=0.1
)

ADOPTING = replace(FAST, rejoin_s=0.1)


@dataclass
class Side:
    """One edge."""

    bus: MemoryBus
    supervisor: Supervisor
    detached: DetachedJobs
    database: Database
    dead: bool = False

    async def kill(self) -> None:
        """As kill -9: nothing is said, nothing is written any more."""
        self.dead = True
        await self.bus.close()
        for task in (*self.detached._tasks, *self.supervisor._tasks):
            task.cancel()
        await asyncio.gather(*self.detached._tasks, *self.supervisor._tasks, return_exceptions=True)

    async def close(self) -> None:
        if not self.dead:
            await self.detached.close()
            await self.supervisor.close(PATIENCE_S)
            assert len(self.supervisor) == 0
        await self.database.close()


@dataclass
class Pair:
    cluster: Cluster
    first: Side
    second: Side
    store: SqlJobStore

    async def row(self, job: str) -> StoredJob:
        row = await self.store.get(job, TENANT)
        assert row is not None
        return row


async def make_side(cluster: Cluster, bus: MemoryBus, home: Path, supervisor: Supervisor, timing: DetachedTiming) -> Side:
    database = Database(database_url("", home))
    detached = DetachedJobs(
        SqlJobStore(database),
        lambda: migrate(database),
        supervisor,
        bus,
        cluster.subjects,
        SystemClock(),
        Random(bus.process),
        Metrics.null(),
        timing=timing,
    )
    await detached.open()
    await until(lambda: detached.ready)
    return Side(bus, supervisor, detached, database)


@contextmanager
def _database_time() -> Iterator[None]:
    """Leases in the database are between edges that a test runs in one process: its clock stands still with them."""
    since = time.time() - time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("jobs", "checkpoints"):  # both write leases, and compare them
            patch.setattr(f"services.edge.store.{module}.database_time", lambda: sa.literal(since + time.monotonic()))
        yield


@asynccontextmanager
async def pair(home: Path, *, lease_s: float = QUICK.lease_s, timing: Timing = ADOPTING) -> AsyncIterator[Pair]:
    """`timing`: of the second edge."""
    with _database_time():
        async with _pair(home, replace(QUICK, lease_s=lease_s), timing) as made:
            yield made


@asynccontextmanager
async def _pair(home: Path, quick: DetachedTiming, timing: Timing) -> AsyncIterator[Pair]:
    cluster = Cluster()
    cluster.then = cluster.accept(RUN, prefill="", decode=DECODE)
    await cluster.open()
    bus = MemoryBus(cluster.broker, SECOND, role="edge")
    other = Supervisor(bus, cluster.queue, cluster.subjects, SystemClock(), Random(5), Metrics.null(), timing)
    await other.open()
    first = await make_side(cluster, cluster.edge_bus, home, cluster.edge, quick)
    second = await make_side(cluster, bus, home, other, quick)
    cluster.report()
    try:
        yield Pair(cluster, first, second, SqlJobStore(second.database))
    finally:
        await first.close()
        await second.close()
        await cluster.bus.close()


class Owner:
    """A worker that owns one job: token i is `base` + i. It speaks where it was told to last, and repeats what it is asked for.

    Its digests come until the cluster's bus is closed.
    """

    def __init__(self, cluster: Cluster, job: Job, run: int = RUN, base: int = 100) -> None:
        self.job = job
        self.run = run
        self.base = base
        self.said = self._began = sum(len(choice.generated) for choice in job.choices)
        self.finished = False
        self.held: list[str] = []
        """Edges that said that they hold the job."""
        self.cancels = 0
        self.deaf = False
        """It is dead: it hears and says nothing."""
        self._ended: State | None = None
        self._cluster = cluster
        self._reply_to = job.reply_to

    async def listen(self, *, digests: bool = True) -> None:
        bus, subjects = self._cluster.bus, self._cluster.subjects
        await bus.subscribe(subjects.attach(self.job.job), self._on_control)
        await bus.subscribe(subjects.control(DECODE), self._on_control)
        self._say(events=(self._event(State.PREFILLING, OWNED),))
        if digests:
            self._digesting = asyncio.create_task(self._digests())

    def go_on(self, count: int, finish: FinishReason | None = None) -> None:
        self.said += count
        self.finished = finish is not None
        self._say(frames=(self._frame(self.said - count, self.said),))
        if finish is not None:
            self._say(events=(self._event(State.FINISHED),))

    def retry(self) -> None:
        self._ended = State.RETRY
        self._say(events=(self._event(State.RETRY),))

    def tokens(self) -> list[int]:
        return [self.base + index for index in range(self.said)]

    def _on_control(self, msg: Msg) -> None:
        if msg.no_responders or self.deaf:
            return  # it spoke to an edge that is dead, or is dead itself
        control = decode(msg.data, Control)
        if control.job != self.job.job:
            return
        if control.verb is Verb.CANCEL:
            self.cancels += 1
            self._ended = State.CANCELLED
            self._say(events=(self._event(State.CANCELLED),))
            return
        if control.verb is Verb.ATTACH and not control.reply_to:
            self.held.append(control.edge)
            return
        if control.verb is Verb.ATTACH:
            self._reply_to = control.reply_to
        if msg.reply:
            self._digest(msg.reply)
        for position in control.positions:
            if position.index < self.said:
                self._say(frames=(self._frame(position.index, self.said),))
        if self._state.terminal:
            self._say(events=(self._event(self._state),))

    async def _digests(self) -> None:
        while self._cluster.bus.connected and not self.deaf:
            self._digest(self._reply_to)
            await asyncio.sleep(0.05)

    def _digest(self, to: str) -> None:
        entry = DigestEntry(
            run=self.run, job=self.job.job, attempt=self.job.attempt, hop=2, state=self._state, last=((0, self.said - 1),)
        )
        self._cluster.bus.publish(to, encode(Digest(process=DECODE, runs=(entry,))), reply=self._cluster.subjects.control(DECODE))

    @property
    def _state(self) -> State:
        return self._ended or (State.FINISHED if self.finished else State.DECODING)

    def _frame(self, begin: int, end: int) -> Frame:
        return Frame(
            run=self.run,
            job=self.job.job,
            attempt=self.job.attempt,
            hop=2,
            index=begin,
            tokens=tuple(self.base + index for index in range(begin, end)),
            finish=FinishReason.STOP if self.finished else None,
            cached_tokens=CACHED,
            compute_s=TOKEN_S * (end - self._began),
        )

    def _event(self, state: State, reason: str = "") -> Event:
        return Event(run=self.run, job=self.job.job, attempt=self.job.attempt, hop=2, state=state, reason=reason, weights="w")

    def _say(self, *, frames: tuple[Frame, ...] = (), events: tuple[Event, ...] = ()) -> None:
        message = Frames(process=DECODE, frames=frames, events=events)
        self._cluster.bus.publish(self._reply_to, encode(message), reply=self._cluster.subjects.control(DECODE))


async def begun(
    pair: Pair,
    *,
    tokens: int = 3,
    run: int = RUN,
    digests: bool = True,
    bill: Bill | None = None,
    over: Callable[[int], None] = nothing,
) -> tuple[str, Owner]:
    """A job that the first edge submitted and a worker owns, with its first tokens in the database."""
    count = len(pair.cluster.jobs)
    pair.cluster.answers = [pair.cluster.accept(run, prefill="", decode=DECODE)]
    submitting = asyncio.create_task(pair.first.detached.submit(long_draft(), TENANT, bill, over))
    owner = Owner(pair.cluster, await pair.cluster.submitted(count + 1), run)
    await owner.listen(digests=digests)
    job = await submitting
    owner.go_on(tokens)
    await written(pair, job, tokens)
    return job, owner


async def state_is(pair: Pair, job: str, state: JobState) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await pair.row(job)).state is not state:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.02)


async def written(pair: Pair, job: str, tokens: int) -> None:
    """Until so many tokens of the job are in the database."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await pair.store.read(job, {0: 0})
            if found is not None and sum(chunk.count for chunk in found.chunks) >= tokens:
                return
            await asyncio.sleep(0.01)


def long_draft() -> Draft:
    return replace(draft(total_s=TOTAL_S), sampling=Sampling(seed=7, max_tokens=1000))


async def read_all(reader: DetachedReader, timeout: float = PATIENCE_S) -> tuple[list[int], FinishReason | None]:
    """All tokens of choice 0 that are still to come, and its finish."""
    tokens: list[int] = []
    finish = None
    async with asyncio.timeout(timeout):
        while not reader.done:
            for delta in await reader.next(1.0):
                tokens += delta.tokens
                finish = delta.finish
    return tokens, finish


async def attach(side: Side, job: str, first: Mapping[int, int] | None = None) -> DetachedReader:
    return await side.detached.attach(job, TENANT, first)
