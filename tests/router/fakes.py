"""Workers that answer as told, and jobs for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

from schemas.codec import SchemaRange
from schemas.identity import job_id, process_id
from schemas.job import Choice, Deadlines, Job, Sampling, Tier, pack_ids
from schemas.placement import (
    Accept,
    Lease,
    LeaseAnswer,
    LeaseItem,
    LeaseResult,
    LeaseVerb,
    Placement,
    Refuse,
    WorkerAnswer,
)
from schemas.state import Capabilities, Credits, Rates, Role, WorkerState
from schemas.subjects import Subjects
from services.bus.interface import Bus, Msg
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Refusals, answer, listen, send
from services.clock import Clock, SystemClock

MODEL = "tiny"
SUBJECTS = Subjects()
_random = Random(7)


def a_process(name: str, wall: float = 1_700_000_000.0) -> str:
    return process_id(name, wall, _random)


EDGE = a_process("edge")


def a_job(
    *,
    tokens: int = 10,
    model: str = MODEL,
    tier: Tier = Tier.PAID,
    lane: int = 0,
    attempt: int = 1,
    generated: tuple[int, ...] = (),
    resume: bool = False,
    weights: str = "",
    queue_s: float | None = 30.0,
    stamp: float | None = None,
    first_token_s: float | None = None,
    salt: bytes = b"",
) -> Job:
    return Job(
        job=job_id(_random),
        attempt=attempt,
        model=model,
        prompt=pack_ids(range(tokens)),
        sampling=Sampling(seed=1, max_tokens=4),
        deadlines=Deadlines(
            stamp=SystemClock().wall() if stamp is None else stamp, total=600.0, queue=queue_s, first_token=first_token_s
        ),
        reply_to=SUBJECTS.reply(EDGE),
        edge=EDGE,
        choices=(Choice(index=0, generated=generated),),
        tier=tier,
        lane=lane,
        salt=salt,
        resume=resume,
        weights=weights,
    )


def a_state(process: str, role: Role, **changes: object) -> WorkerState:
    values: dict[str, object] = {
        "model": MODEL,
        "kv_compat": "kv",
        "weights": "w",
        "schemas": SchemaRange(),
        "capabilities": Capabilities(seed=True),
        "credits": Credits(version=1, prefill_tokens=512, decode_slots=4, kv_blocks=100),
        "sent": 0.0,
        "context_length": 1024,
        "block_tokens": 16,
        "kv_total": 100,
    }
    return WorkerState(process=process, role=role, **(values | changes))  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class FakeWorker:
    """A worker that takes everything it has room for. `refuses` and `silent` hold "lease" or "submit".

    `beats`: says its state after every answer, as a real one does within 20 ms."""

    bus: Bus
    role: Role = Role.PREFILL
    model: str = MODEL
    kv_compat: str = "kv"
    slots: int = 4
    blocks: int = 100
    queued: int = 0
    running: int = 0
    draining: bool = False
    backlog_s: float = 0.0
    beats: bool = True
    refuses: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    reserved: dict[int, int] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    placed: list[Placement] = field(default_factory=list)
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def process(self) -> str:
        return self.bus.process

    @property
    def runs(self) -> set[int]:
        return {placement.run for placement in self.placed}

    async def start(self) -> FakeWorker:
        refusals = Refusals()
        submit = SUBJECTS.prefill_submit if self.role is Role.PREFILL else SUBJECTS.decode_submit
        await listen(self.bus, submit(self.process), Placement, self._on_submit, refusals=refusals)
        await listen(self.bus, SUBJECTS.decode_lease(self.process), Lease, self._on_lease, refusals=refusals)
        self.beat()
        return self

    def beat(self) -> None:
        state = a_state(
            self.process,
            self.role,
            model=self.model,
            kv_compat=self.kv_compat,
            credits=self.credits(),
            queued=self.queued,
            running=self.running,
            draining=self.draining,
            backlog=int(1000 * self.backlog_s),
            rates=Rates(prefill_tokens_s=1000.0) if self.backlog_s else Rates(),
        )
        send(self.bus, SUBJECTS.worker_state(self.role, self.model, self.process), state)

    def credits(self) -> Credits:
        free = self.slots - len(self.reserved)
        blocks = self.blocks - sum(self.reserved.values())
        tokens = 0 if self.role is Role.DECODE else 512  # a decode worker that has no step left for a tail
        return Credits(version=next(self.versions), prefill_tokens=tokens, decode_slots=free, kv_blocks=blocks)

    def full(self) -> None:
        """No room for anything, and everybody hears of it."""
        self.slots, self.queued = 0, 1
        self.beat()

    def free(self) -> None:
        self.slots, self.queued = 4, 0
        self.beat()

    def _on_lease(self, lease: Lease, msg: Msg) -> None:
        self.heard.append(f"lease {lease.items[0].verb}")
        results = tuple(self._apply(item) for item in lease.items)
        if "lease" not in self.silent:
            answer(self.bus, msg, LeaseAnswer(results=results, credits=self.credits()))
        self._changed()

    def _apply(self, item: LeaseItem) -> LeaseResult:
        if item.verb is LeaseVerb.RELEASE:
            self.reserved.pop(item.run, None)
            return LeaseResult(run=item.run, ok=True)
        if "lease" in self.refuses or len(self.reserved) >= self.slots:
            return LeaseResult(run=item.run, ok=False, reason="no_slot")
        self.reserved[item.run] = item.blocks
        return LeaseResult(run=item.run, ok=True)

    def _on_submit(self, placement: Placement, msg: Msg) -> None:
        self.heard.append("submit")
        said: WorkerAnswer = Refuse(run=placement.run, reason="busy", credits=self.credits())
        if "submit" not in self.refuses:
            self.placed.append(placement)
            said = Accept(run=placement.run, credits=self.credits())
        if "submit" not in self.silent:
            answer(self.bus, msg, said)
        self._changed()

    def _changed(self) -> None:
        if self.beats:
            self.beat()


async def a_worker(broker: MemoryBroker, name: str, role: Role, clock: Clock | None = None, **changes: object) -> FakeWorker:
    bus = MemoryBus(broker, a_process(name), clock=clock)
    return await FakeWorker(bus, role, **changes).start()  # type: ignore[arg-type]
