"""The far side of an edge, played over a bus in memory: a router that accepts every job, a worker that says its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

from schemas.codec import decode, encode
from schemas.identity import process_id
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Accepted
from schemas.reply import OWNED, Event, FinishReason, Frame, Frames
from schemas.state import Capabilities, ModelCard, QueueReport
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.memory import MemoryBroker, MemoryBus

_CAPABILITIES = Capabilities(seed=True)
_FIRST_ID = 500
"""From there on, ids are ordinary words."""


class FarSide:
    """`at_once`: so many tokens of a job follow its acceptance; 0: they come when the bench says them.

    `jobs`: those that were accepted. `spent`: seconds of CPU that playing it took.
    """

    def __init__(self, broker: MemoryBroker, edge: str, model: str) -> None:
        self.at_once = 0
        self.jobs: list[Job] = []
        self.spent = 0.0
        self._model = model
        self._router, self._worker = (process_id(name, 1.0, Random(1)) for name in ("r1", "d1"))
        self._subjects = Subjects()
        self._bus = MemoryBus(broker, self._worker, role="decode")
        self._reply_to = self._subjects.reply(edge)

    async def open(self) -> None:
        await self._bus.subscribe(self._subjects.submit(self._model), self._submit, queue="routers")

    def report(self) -> None:
        """What a router says each second: that the model is served."""
        card = ModelCard(model=self._model, capabilities=_CAPABILITIES, context_length=2048, weights=("w",))
        report = QueueReport(router=self._router, model=self._model, card=card)
        self._bus.publish(self._subjects.queue(self._model), encode(report))

    def steps(self, jobs: Sequence[Job], tokens: int) -> list[bytes]:
        """One message a step, in it a token of each job; the last one ends them all."""
        return [self._step(jobs, at, last=at == tokens - 1) for at in range(tokens)]

    def say(self, message: bytes) -> None:
        self._bus.publish(self._reply_to, message, reply=self._subjects.control(self._worker))

    def _submit(self, msg: Msg) -> None:
        began = time.thread_time()
        job = decode(msg.data, Job)
        self.jobs.append(job)
        self._bus.publish(msg.reply, encode(Accepted(run=_run(job), prefill="", decode=self._worker, router=self._router)))
        self.say(encode(Frames(process=self._worker, events=(_event(job, State.DECODING, OWNED),))))
        for message in self.steps([job], self.at_once):
            self.say(message)
        self.spent += time.thread_time() - began

    def _step(self, jobs: Sequence[Job], at: int, *, last: bool) -> bytes:
        finish = FinishReason.LENGTH if last else None
        about = {"attempt": 1, "hop": 2, "index": at, "tokens": (_FIRST_ID + at,), "finish": finish}
        frames = tuple(Frame(run=_run(job), job=job.job, **about) for job in jobs)  # type: ignore[arg-type]
        ends = tuple(_event(job, State.FINISHED) for job in jobs) if last else ()
        return encode(Frames(process=self._worker, frames=frames, events=ends))


def _run(job: Job) -> int:
    return int(job.job[:15], 16) + 1


def _event(job: Job, state: State, reason: str = "") -> Event:
    return Event(run=_run(job), job=job.job, attempt=1, hop=2, state=state, reason=reason, weights="w")
