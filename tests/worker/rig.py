"""A prefill and a decode worker with scripted engines on the in-memory bus; the test plays router and edge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Literal

from schemas.codec import decode
from schemas.control import Control, Position, Verb
from schemas.handoff import BlockRef, Ticket
from schemas.identity import job_id, process_id, run_id
from schemas.job import Deadlines, Job, Sampling, Tier, pack_ids
from schemas.lifecycle import State
from schemas.placement import CachedBlocks, Lease, LeaseAnswer, LeaseItem, LeaseVerb, Placement, WorkerAnswer
from schemas.reply import PROMPT, Digest, Event, Frame, Reply
from schemas.state import Capabilities, EdgeBeat, Role
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Refusals, ask, send
from services.clock import SystemClock
from services.decode.decode import Decode
from services.engine.core import StepEngine
from services.engine.protocol import DecodeEngine, EngineInfo
from services.engine.scripted import Script, ScriptedRunner, Timing
from services.engine.speculation import build_scheduler
from services.kv import memory as kv_memory
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from services.kv.swap import SwapSpace
from services.kv.transfer.auto import TransferKind, open_carriers, transfer_client
from services.kv.transfer.interface import Fetched, TransferClient, TransferLimits, TransferServer
from services.kv.transfer.memory import MemoryTransferClient, MemoryTransferServer
from services.kv.transfer.server import SocketTransferServer
from services.prefill.prefill import Prefill
from services.settings.worker import WorkerSettings
from services.telemetry.metrics import Metrics
from services.text.grammar import KINDS, model_vocabulary
from services.text.grammar_cache import GrammarCache
from services.worker.detached import Attendance
from services.worker.digests import send_digests
from services.worker.hearing import hear
from services.worker.steps import take_step
from services.worker.upkeep import keep_up
from services.worker.worker import Worker
from tests.text.tiny import tiny_tokenizer_json
from tests.waiting import PATIENCE_S, until

__all__ = ["Rig", "rig", "until"]

BLOCK_TOKENS = 4
BLOCKS = 64
EOS = 0
Carrier = TransferKind | Literal["memory"]
_random = Random(7)


def engine(
    timing: Timing, scripts: tuple[Script, ...], blocks: int = BLOCKS, *, cache: bool = True, swap: int = 0, guess: int = 0
) -> StepEngine:
    memory = kv_memory.allocate(blocks * 64)
    prefix = prefix_cache(enabled=cache)
    pool = BlockPool(blocks, block_bytes=64, memory=memory.view, fd=memory.fd, prefix=prefix, swap=SwapSpace(swap))
    runner = ScriptedRunner(pool, block_tokens=BLOCK_TOKENS, vocab=range(10, 300), eos_id=EOS, scripts=scripts, timing=timing)
    info = EngineInfo(
        name="scripted",
        version="1",
        model="m",
        weights="w",
        kv_compat="k",
        capabilities=Capabilities(seed=True, n=True, logprobs=True, grammar=KINDS, exact_resume=True, prompt_logprobs=True),
        context_length=512,
        vocab_size=300,
        block_tokens=BLOCK_TOKENS,
        eos_ids=frozenset({EOS}),
        step_tokens=64,
        max_batch=8,
    )
    grammars = GrammarCache(model_vocabulary(tiny_tokenizer_json(), 300, frozenset({EOS})))
    scheduler = build_scheduler(WorkerSettings(max_batch=8, step_tokens=64, speculative_tokens=guess), info, pool)
    return StepEngine(info, pool, runner, scheduler, SystemClock(), grammars)


@dataclass
class EdgeDouble:
    """Collects what workers say."""

    bus: MemoryBus
    frames: list[Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    controls: dict[int, str] = field(default_factory=dict)

    def on_reply(self, msg: Msg) -> None:
        reply = decode(msg.data, Reply)  # type: ignore[arg-type]
        if isinstance(reply, Digest):
            self.digests.append(reply)
            return
        for record in (*reply.frames, *reply.events):
            self.controls[record.run] = msg.reply
        self.frames.extend(reply.frames)
        self.events.extend(reply.events)

    def states(self, run: int) -> list[tuple[int, State]]:
        return [(event.hop, event.state) for event in self.events if event.run == run]

    def reason(self, run: int) -> str:
        return next(event.reason for event in self.events if event.run == run and event.state.terminal)

    def ended(self, run: int) -> State | None:
        return next((event.state for event in self.events if event.run == run and event.state.terminal), None)

    def tokens(self, run: int) -> list[int]:
        """Tokens by index; what two hops both sent must agree."""
        by_index: dict[int, int] = {}
        for frame in self.frames:
            if frame.run == run and frame.choice != PROMPT:
                for offset, token in enumerate(frame.tokens):
                    assert by_index.setdefault(frame.index + offset, token) == token
        assert sorted(by_index) == list(range(len(by_index)))
        return [by_index[index] for index in sorted(by_index)]

    def control(self, run: int, verb: Verb = Verb.CANCEL, *, to: str, positions: tuple[Position, ...] = ()) -> None:
        job = next((frame.job for frame in (*self.frames, *self.events) if frame.run == run), "0" * 32)
        send(self.bus, to, Control(run=run, job=job, verb=verb, positions=positions))


class CountingClient:
    """A `TransferClient` that keeps how many blocks each fetch asked for."""

    def __init__(self, client: TransferClient) -> None:
        self.client = client
        self.pulls: list[int] = []

    async def fetch(self, ticket: Ticket, blocks: Sequence[BlockRef], *args: Any, **options: Any) -> Fetched:
        self.pulls.append(len(blocks))
        return await self.client.fetch(ticket, blocks, *args, **options)


@dataclass
class Rig:
    edge: EdgeDouble
    router: MemoryBus
    prefill: Worker
    decode: Worker
    broker: MemoryBroker
    transfer: CountingClient
    fetches: CountingClient
    servers: dict[str, TransferServer]
    subjects: Subjects = field(default_factory=Subjects)

    def job(self, prompt: list[int] | None = None, *, max_tokens: int = 8, seed: int = 1, total_s: float = 120.0) -> Job:
        return Job(
            job=job_id(_random),
            attempt=1,
            model="m",
            prompt=pack_ids(prompt or list(range(20, 30))),
            sampling=Sampling(seed=seed, max_tokens=max_tokens),
            deadlines=Deadlines(stamp=time.time(), total=total_s),
            reply_to=self.subjects.reply(self.edge.bus.process),
            edge=self.edge.bus.process,
            tier=Tier.PAID,
        )

    async def reserve(self, run: int, blocks: int) -> LeaseAnswer:
        lease = Lease(process="r1", items=(LeaseItem(run=run, verb=LeaseVerb.RESERVE, blocks=blocks),))
        return await ask(self.router, self.subjects.decode_lease(self.decode.bus.process), lease, LeaseAnswer, timeout=PATIENCE_S)

    async def submit(
        self, job: Job, *, reserve: bool = True, run: int = 0, fetch: CachedBlocks | None = None
    ) -> tuple[int, object]:
        """What a router does: reserve on decode, submit to prefill."""
        run = run or run_id(_random)
        if reserve:
            answer = await self.reserve(run, -(-job.prompt_tokens // BLOCK_TOKENS) + 1)
            assert answer.results[0].ok, answer.results[0].reason
        placement = Placement(run=run, job=job, decode=self.decode.bus.process, fetch=fetch)
        subject = self.subjects.prefill_submit(self.prefill.bus.process)
        return run, await ask(self.router, subject, placement, WorkerAnswer, timeout=PATIENCE_S)

    async def submit_locally(self, job: Job) -> tuple[int, object]:
        run = run_id(_random)
        subject = self.subjects.decode_submit(self.decode.bus.process)
        return run, await ask(self.router, subject, Placement(run=run, job=job), WorkerAnswer, timeout=PATIENCE_S)

    def clean(self) -> bool:
        """Nothing but the prefix caches keeps a block, and no run is left."""
        for worker in (self.prefill, self.decode):
            worker.engine.pool.check_integrity()
        workers = (self.prefill, self.decode)
        return all(w.engine.pool.available == w.engine.pool.total and len(w.runs) == 0 for w in workers)

    def control_of(self, worker: Worker) -> str:
        return self.subjects.control(worker.bus.process)


@asynccontextmanager
async def rig(
    *,
    prefill: Timing | None = None,
    decode: Timing | None = None,
    scripts: tuple[Script, ...] = (),
    decode_blocks: int = BLOCKS,
    decode_swap: int = 0,
    limits: TransferLimits | None = None,
    pull_block_s: float = 0.0,
    fetch_block_s: float = 0.0,
    carrier: Carrier = "memory",
    edge_beats: bool = True,
    cache: bool = True,
    guess: int = 0,
    engines: dict[str, DecodeEngine] | None = None,
) -> AsyncIterator[Rig]:
    """`guess`: tokens that decode guesses ahead. `Timing` delays make a stage long enough to do something in it. `carrier`: in
    memory, or over real sockets. `engines`: others than scripted ones, as p1 and d1, warm already."""
    broker, clock, subjects = MemoryBroker(), SystemClock(), Subjects()
    limits = limits or TransferLimits()
    buses = {name: MemoryBus(broker, process_id(name, time.time(), _random)) for name in ("e1", "r1", "p1", "d1")}
    edge = EdgeDouble(buses["e1"])
    await buses["e1"].subscribe(subjects.reply(buses["e1"].process), edge.on_reply)
    engines = engines or {
        "p1": engine(prefill or Timing(), scripts, cache=cache),
        "d1": engine(decode or Timing(), scripts, decode_blocks, cache=cache, swap=decode_swap, guess=guess),
    }
    roles = {"p1": Role.PREFILL, "d1": Role.DECODE}
    workers = {n: Worker(buses[n], subjects, engines[n], roles[n], clock, Metrics.null()) for n in engines}
    network: dict[str, MemoryTransferServer] = {}
    servers = {name: await _server(carrier, network, name, engines[name].pool, limits) for name in engines}
    transfer, fetches = (CountingClient(_client(carrier, network, limits, each)) for each in (pull_block_s, fetch_block_s))
    prefill_phase = Prefill(workers["p1"], engines["p1"], servers["p1"], fetches)
    decode_phase = Decode(workers["d1"], engines["d1"], transfer, servers["d1"])
    refusals = Refusals()
    for worker in workers.values():
        worker.engine.start(partial(take_step, worker))
        await hear(worker, refusals)
        worker.spawn(keep_up(worker), "upkeep")
        worker.spawn(Attendance(worker, refusals).run(), "attendance")
        worker.spawn(send_digests(worker.bus, subjects, worker.runs, worker.stalls), "digests")
    await prefill_phase.start(refusals)
    await decode_phase.start(refusals)
    beating = asyncio.create_task(_beat(edge.bus, subjects)) if edge_beats else None
    try:
        yield Rig(edge, buses["r1"], workers["p1"], workers["d1"], broker, transfer, fetches, servers)
    finally:
        if beating is not None:
            beating.cancel()
        for worker in workers.values():
            await worker.close()
            worker.engine.pool.check_integrity()
        for server in servers.values():
            await server.close()


async def _server(
    carrier: Carrier, network: dict[str, MemoryTransferServer], name: str, pool: BlockPool, limits: TransferLimits
) -> TransferServer:
    if carrier == "memory":
        fake = MemoryTransferServer(pool, network, name, clock=SystemClock(), limits=limits)
        await fake.start()
        return fake
    server = SocketTransferServer(pool, clock=SystemClock(), limits=limits)
    await server.start("127.0.0.1", 0)
    await open_carriers(server, carrier)
    return server


def _client(carrier: Carrier, network: dict[str, MemoryTransferServer], limits: TransferLimits, block_s: float) -> TransferClient:
    if carrier == "memory":
        return MemoryTransferClient(network, limits=limits, block_s=block_s)
    return transfer_client(carrier, limits=limits)


async def _beat(bus: MemoryBus, subjects: Subjects) -> None:
    while True:
        send(bus, subjects.edge_state(bus.process), EdgeBeat(process=bus.process, sent=time.time()))
        await asyncio.sleep(0.5)
