"""The other side of the bus, played by the test: one router and any number of workers, all said by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from schemas.codec import decode, encode
from schemas.control import CancelAck, CancelJob, Control, Verb
from schemas.identity import process_id
from schemas.job import Job, Sampling, pack_ids
from schemas.lifecycle import State
from schemas.placement import Accepted, Queue, Refused
from schemas.reply import OWNED, Digest, Event, FinishReason, Frame, Frames, Logprob
from schemas.state import Capabilities, Cause, Death, ModelCard, QueueReport
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.memory_queue import MemoryWorkQueue
from services.clock import Clock, SystemClock
from services.edge.jobs.draft import Delta, Draft, Limits
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.supervisor import Supervisor
from services.edge.jobs.timing import Timing
from services.telemetry.metrics import Metrics
from tests.waiting import PATIENCE_S, until

MODEL = "scripted"
FAST = Timing(
    submit_s=0.3,
    repeat_s=0.02,
    stalled_s=0.1,
    owned_s=0.3,
    cancel_s=0.5,
    settle_s=0.0,
    pace_s=(0.005, 0.01),
    reconnect_s=0.2,
    queue_s=1.0,
    queue_pace_s=(0.005, 0.01),
    beat_s=0.05,
)
Answer = Accepted | Queue | Refused | None
CAPABILITIES = Capabilities(seed=True, exact_resume=True)


def process(name: str, at: float = 1.0) -> str:
    return process_id(name, at, Random(name + str(at)))


EDGE, ROUTER, PREFILL, DECODE = process("edge"), process("router"), process("p1"), process("d1")


class Cluster:
    """`answers` are the router's next ones, then `then`. What it heard is in `jobs`, `controls`, `cancels`.

    `clock`: the edge's.
    """

    def __init__(self, clock: Clock | None = None, timing: Timing = FAST) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, ROUTER, role="router")
        self.edge_bus = MemoryBus(self.broker, EDGE, role="edge")
        self.queue = MemoryWorkQueue()
        self.subjects = Subjects()
        self.answers: list[Answer] = []
        self.then: Answer = None
        self.jobs: list[tuple[str, Job]] = []
        self.inboxes: list[str] = []
        self.controls: list[tuple[str, Control]] = []
        self.cancels: list[CancelJob] = []
        self.acks = True
        self.listens = True
        about = (clock or SystemClock(), Random(1), Metrics.null(), timing)
        self.edge = Supervisor(self.edge_bus, self.queue, self.subjects, *about)
        self._random = Random(2)
        self._submit: Any = None

    async def open(self) -> None:
        await self.edge.open()
        await self.listen()
        await self.bus.subscribe(self.subjects.router_submit(ROUTER), self._on_submit)
        await self.bus.subscribe(self.subjects.control("*"), self._on_control)
        await self.bus.subscribe(self.subjects.cancel(), self._on_cancel)
        self.report()
        await until(lambda: self.edge.models.card(MODEL))

    async def close(self) -> None:
        await self.edge.close(PATIENCE_S)
        assert len(self.edge) == 0

    async def listen(self) -> None:
        """A router of the group does."""
        self._submit = await self.bus.subscribe(self.subjects.submit(MODEL), self._on_submit, queue="routers")

    async def deafen(self) -> None:
        """No router listens any more."""
        await self._submit.unsubscribe()

    def report(self, **values: Any) -> None:
        card = ModelCard(model=MODEL, capabilities=CAPABILITIES, context_length=512, weights=("w",))
        report = QueueReport(router=ROUTER, model=MODEL, card=card, **values)
        self.bus.publish(self.subjects.queue(MODEL), encode(report))

    # the router

    def accept(self, run: int, prefill: str = PREFILL, decode: str = DECODE) -> Accepted:
        return Accepted(run=run, prefill=prefill, decode=decode, router=ROUTER)

    def _on_submit(self, msg: Msg) -> None:
        self.jobs.append((msg.subject, decode(msg.data, Job)))
        self.inboxes.append(msg.reply)
        answer = self.answers.pop(0) if self.answers else self.then
        if answer is not None:
            self.bus.publish(msg.reply, encode(answer))

    def _on_cancel(self, msg: Msg) -> None:
        cancel = decode(msg.data, CancelJob)
        self.cancels.append(cancel)
        if self.acks:
            self.bus.publish(msg.reply, encode(CancelAck(router=ROUTER, job=cancel.job)))

    def _on_control(self, msg: Msg) -> None:
        if not msg.no_responders:
            self.controls.append((msg.subject.rpartition(".")[2], decode(msg.data, Control)))

    def cancelled(self, who: str, run: int) -> int:
        """How often `who` was told to cancel `run`."""
        return sum(p == who and c.run == run and c.verb is Verb.CANCEL for p, c in self.controls)

    def replays(self) -> list[Control]:
        return [control for _, control in self.controls if control.verb is Verb.REPLAY]

    # the workers

    async def submitted(self, count: int) -> Job:
        """The `count`-th job that reached the router."""
        await until(lambda: len(self.jobs) >= count)
        return self.jobs[count - 1][1]

    def say(self, who: str, *, frames: Sequence[Frame] = (), events: Sequence[Event] = ()) -> None:
        message = Frames(process=who, frames=tuple(frames), events=tuple(events))
        self.bus.publish(self.subjects.reply(EDGE), encode(message), reply=self.subjects.control(who))

    def digest(self, who: str, digest: Digest) -> None:
        self.bus.publish(self.subjects.reply(EDGE), encode(digest), reply=self.subjects.control(who))

    def event(self, who: str, job: Job, run: int, hop: int, state: State, **values: Any) -> None:
        event = Event(run=run, job=job.job, attempt=job.attempt, hop=hop, state=state, **values)
        self.say(who, events=[event])

    def own(self, who: str, job: Job, run: int, hop: int = 1, state: State = State.PREFILLING) -> None:
        self.event(who, job, run, hop, state, reason=OWNED, weights="w")

    def tokens(
        self,
        who: str,
        job: Job,
        run: int,
        index: int,
        tokens: Sequence[int],
        *,
        hop: int = 2,
        choice: int = 0,
        finish: FinishReason | None = None,
        logprobs: bool = False,
    ) -> None:
        frame = Frame(
            run=run,
            job=job.job,
            attempt=job.attempt,
            hop=hop,
            choice=choice,
            index=index,
            tokens=tuple(tokens),
            logprobs=tuple(Logprob(token=token, logprob=-1.0) for token in tokens) if logprobs else (),
            finish=finish,
        )
        self.say(who, frames=[frame])

    def die(self, who: str, cause: Cause = Cause.KILLED) -> None:
        for _ in range(3):
            self.bus.publish(self.subjects.dead(who), encode(Death(process=who, cause=cause)))


def draft(*, queue_s: float = 60.0, first_token_s: float = 60.0, total_s: float = 120.0) -> Draft:
    return Draft(
        model=MODEL,
        prompt=pack_ids([1, 2, 3]),
        sampling=Sampling(seed=7, max_tokens=100),
        limits=Limits(queue_s=queue_s, first_token_s=first_token_s, total_s=total_s),
        lane=3,
        salt=b"s",
    )


async def collect(handle: JobHandle, timeout: float = PATIENCE_S) -> tuple[list[int], FinishReason | None]:
    """All tokens of choice 0 and its finish."""
    tokens: list[int] = []
    finish = None
    async with asyncio.timeout(timeout):
        while not handle.done:
            for delta in await handle.next(1.0):
                tokens += delta.tokens
                finish = delta.finish
    return tokens, finish


def joined(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]
