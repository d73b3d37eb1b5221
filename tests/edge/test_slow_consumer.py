"""A real server cuts an edge off because it does not read: what was lost on the way comes again, in the same attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from schemas.codec import encode
from schemas.control import Control, Verb
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Accepted
from schemas.reply import OWNED, Digest, DigestEntry, Event, FinishReason, Frame
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.memory_queue import MemoryWorkQueue
from services.bus.nats_bus import NatsBus, connect
from services.bus.typed import Refusals, answer, listen
from services.clock import SystemClock
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.supervisor import Supervisor
from services.edge.jobs.timing import Timing
from services.telemetry.metrics import Metrics
from services.worker.outbox import Outbox
from services.worker.replay import ReplayRing
from tests.edge.cluster import DECODE, EDGE, ROUTER, collect, draft
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S, until

SUBJECTS = Subjects()
RARELY_S = 60.0
"""Between two messages that the edge sends by itself: writing is how it would hear too soon that the server gave it up."""
IMPATIENT = 'max_payload: 2MB\nmax_pending: 2MB\nwrite_deadline: "1s"\n'


@dataclass
class Worker:
    """Accepts every job, says what a test wants, and repeats what it is asked for."""

    bus: NatsBus
    outbox: Outbox
    jobs: dict[int, Job] = field(default_factory=dict)
    replays: list[int] = field(default_factory=list)

    async def start(self) -> None:
        await listen(self.bus, SUBJECTS.submit_any(), Job, self._submit, refusals=Refusals())
        await listen(self.bus, SUBJECTS.control(DECODE), Control, self._control, refusals=Refusals())
        await self.bus.flush(PATIENCE_S)

    def say(self, run: int, first: int, tokens: list[int], finish: FinishReason | None = None) -> None:
        job = self.jobs[run]
        frame = Frame(run=run, job=job.job, attempt=job.attempt, hop=2, index=first, tokens=tuple(tokens), finish=finish)
        self.outbox.frame(job.reply_to, frame)
        if finish:
            self._event(run, State.FINISHED)
        self.outbox.flush()

    def digest(self, run: int, state: State, last: int) -> None:
        job = self.jobs[run]
        entry = DigestEntry(run=run, job=job.job, attempt=job.attempt, hop=2, state=state, last=((0, last),))
        self.bus.publish(job.reply_to, encode(Digest(process=DECODE, runs=(entry,))), reply=SUBJECTS.control(DECODE))

    def _submit(self, job: Job, msg: Msg) -> None:
        run = len(self.jobs) + 1
        self.jobs[run] = job
        answer(self.bus, msg, Accepted(run=run, prefill="", decode=DECODE, router=ROUTER))
        self._event(run, State.DECODING, OWNED)
        self.outbox.flush()

    def _event(self, run: int, state: State, reason: str = "") -> None:
        job = self.jobs[run]
        event = Event(run=run, job=job.job, attempt=job.attempt, hop=2, state=state, reason=reason, weights="w")
        self.outbox.event(job.reply_to, event)

    def _control(self, control: Control, _: Msg) -> None:
        if control.verb is Verb.REPLAY:
            self.replays.append(control.run)
            self.outbox.replay(control.run, control.positions)


@dataclass
class Site:
    edge: Supervisor
    bus: NatsBus
    worker: Worker
    server: NatsServer

    async def cut_off_before(self, say: list[tuple[int, int, list[int], FinishReason | None]]) -> None:
        """The edge stops reading, and much comes, until the server gives it up; then the worker says this."""
        socket = self.bus._client._socket()
        assert socket is not None
        socket.pause_reading()  # type: ignore[attr-defined]
        junk = bytes(1_000_000)
        async with asyncio.timeout(PATIENCE_S):
            while "Slow Consumer" not in self.server.log:
                self.worker.bus.publish("hr.queue.m", junk)
                await self.worker.bus.flush(PATIENCE_S)
        for run, first, tokens, finish in say:
            self.worker.say(run, first, tokens, finish)
        await self.worker.bus.flush(PATIENCE_S)
        socket.resume_reading()  # type: ignore[attr-defined]
        await until(lambda: self.bus.connected and self.bus.steady_for() < 60.0)
        await self.bus.flush(PATIENCE_S)  # the server knows again what it listens to


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    server = NatsServer(tmp_path, IMPATIENT)
    server.start()
    clock = SystemClock()
    worker_bus = await connect(server.url, DECODE, "decode")
    worker = Worker(worker_bus, Outbox(worker_bus, SUBJECTS.control(DECODE), ReplayRing(clock), clock))
    await worker.start()
    edge_bus = await connect(server.url, EDGE, "edge", ping_interval=RARELY_S)
    edge = Supervisor(edge_bus, MemoryWorkQueue(), SUBJECTS, clock, Random(1), Metrics.null(), Timing(beat_s=RARELY_S))
    await edge.open()
    yield Site(edge, edge_bus, worker, server)
    await edge.close(1.0)
    await edge_bus.close()
    await worker_bus.close()
    server.kill()


async def test_a_gap_and_a_lost_end_are_healed_by_replay(site: Site) -> None:
    handles = [site.edge.start(draft()) for _ in range(2)]
    await until(lambda: len(site.worker.jobs) == 2)
    for run in (1, 2):
        site.worker.say(run, 0, [10, 11])
    for handle in handles:
        assert [delta.tokens for delta in await handle.next(PATIENCE_S)] == [[10, 11]]
    lost_end = (2, 2, [12, 13], FinishReason.STOP)
    await site.cut_off_before([(1, 2, [12], None), (1, 3, [13], None), lost_end])
    site.worker.say(1, 4, [14], FinishReason.STOP)  # leaves a gap behind it
    site.worker.digest(2, State.FINISHED, 3)
    assert await collect(handles[_of(handles, site, 1)]) == ([12, 13, 14], FinishReason.STOP)
    assert await collect(handles[_of(handles, site, 2)]) == ([12, 13], FinishReason.STOP)
    assert set(site.worker.replays) == {1, 2}
    assert {job.attempt for job in site.worker.jobs.values()} == {1}


def _of(handles: list[JobHandle], site: Site, run: int) -> int:
    """Which of them became `run`."""
    return [handle._job.id for handle in handles].index(site.worker.jobs[run].job)
