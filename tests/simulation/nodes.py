"""The processes of a cluster, composed as their services compose them; only bus, queue and transfers are simulated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from schemas.state import Capabilities, Role
from schemas.subjects import Subjects
from services.bus.memory import MemoryBus
from services.bus.micro import Service
from services.bus.typed import Refusals
from services.clock import Clock
from services.decode.decode import Decode
from services.edge.detached.jobs import DetachedJobs
from services.edge.jobs.supervisor import Supervisor
from services.engine import runner as engine_runner
from services.engine.core import StepEngine
from services.engine.protocol import EngineInfo
from services.engine.scheduler import ChunkedScheduler, Step
from services.engine.scripted import ScriptedRunner, Timing
from services.kv.pool import BlockPool
from services.kv.swap import SwapSpace
from services.prefill.prefill import Prefill
from services.router.router import Router
from services.router.service import WARM_UP_S
from services.settings.nats import NatsSettings
from services.settings.settings import Settings
from services.telemetry.metrics import Metrics
from services.worker.service import Phase, run
from services.worker.worker import Worker
from tests.simulation.loop import Process
from tests.simulation.plan import STEP_TOKENS, Engine
from tests.simulation.queue import Reached
from tests.simulation.reference import CONTEXT, EOS, VOCAB
from tests.simulation.store import ReachedStore, Rows
from tests.simulation.transfer import Client, Server, Wires

MODEL = "m"
BLOCK_TOKENS = 4
ACCOUNT = "HEADRACE"
SETTINGS = Settings(model=MODEL, nats=NatsSettings(account=ACCOUNT))
METRICS = Metrics.null()
DRAIN_S = 2.0


@dataclass(eq=False)
class Node:
    """One start of one process. `exited`: it ended by itself."""

    process: Process
    bus: MemoryBus
    clock: Clock
    queue: Reached
    random: Random
    stop: asyncio.Event
    started: float
    edge: Supervisor | None = None
    detached: DetachedJobs | None = None
    router: Router | None = None
    worker: Worker | None = None
    exited: bool = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def runner(self) -> Runner:
        """A worker's."""
        assert self.worker is not None
        return self.worker.engine._runner  # type: ignore[attr-defined, no-any-return]

    @property
    def still_until(self) -> float:
        """When its engine begins to compute again; 0 when it never stood still."""
        return self.runner.still_until if self.worker is not None else 0.0

    @property
    def alive(self) -> bool:
        return not self.process.dead and not self.exited


async def serve_edge(node: Node, rows: Rows | None) -> None:
    """`rows`: the database, when there is one."""
    node.edge = Supervisor(node.bus, node.queue, Subjects(), node.clock, node.random, METRICS)
    await node.edge.open()
    if rows is not None:
        store, subjects = ReachedStore(rows), Subjects()
        detached = DetachedJobs(store, _nothing, node.edge, node.bus, subjects, node.clock, node.random, METRICS)
        await detached.open()
        node.detached = detached
    await node.stop.wait()
    if node.detached is not None:
        await node.detached.close()
    await node.edge.close(DRAIN_S)


async def _nothing() -> None:
    """Tables need no migration here."""


async def serve_router(node: Node) -> None:
    node.router = Router(node.bus, node.queue, SETTINGS, node.clock, node.random, Refusals(clock=node.clock))
    await node.router.listen()
    await asyncio.sleep(WARM_UP_S)
    await node.router.join()
    await node.stop.wait()
    await node.router.drain()


async def serve_worker(node: Node, role: Role, shape: Engine, wires: Wires) -> None:
    engine = scripted(shape, node.clock)
    worker = node.worker = Worker(node.bus, Subjects(), engine, role, node.clock, METRICS)
    server, client = Server(wires, node.process, engine.pool, node.clock, node.random), Client(wires, node.process)
    phases: list[Phase] = []
    if role is not Role.DECODE:
        phases.append(Prefill(worker, engine, server, client).start)
    if role is not Role.PREFILL:
        phases.append(Decode(worker, engine, client, server).start)
    await server.start()
    service = Service(node.bus, f"headrace-{role}", "0.1.0", "", clock=node.clock)
    try:
        await run(worker, phases, Refusals(clock=node.clock), NoRegistry(), service, node.stop, DRAIN_S)  # type: ignore[arg-type]
    finally:
        await server.close()


class Runner(ScriptedRunner):
    """Stands still in its next step when told to, whoever is cancelled."""

    stall_s = 0.0
    still_until = 0.0

    async def execute(self, step: Step) -> list[engine_runner.Outcome] | None:
        seconds, self.stall_s = self.stall_s, 0.0
        if seconds:
            self.still_until = asyncio.get_running_loop().time() + seconds
            await asyncio.sleep(seconds)
        return await super().execute(step)


class NoRegistry:
    """`HR_WORKERS` is for people; the control plane must do without."""

    async def ensure(self) -> None:
        return

    async def put(self, key: str, value: object) -> None:
        return


def scripted(shape: Engine, clock: Clock) -> StepEngine:
    memory = memoryview(bytearray(shape.blocks * BLOCK_TOKENS * 8))
    pool = BlockPool(shape.blocks, block_bytes=BLOCK_TOKENS * 8, memory=memory, swap=SwapSpace(shape.blocks // 4))
    timing = Timing(prefill_token_s=shape.prefill_token_s, decode_step_s=shape.decode_step_s)
    runner = Runner(pool, block_tokens=BLOCK_TOKENS, vocab=VOCAB, eos_id=EOS, timing=timing)
    info = EngineInfo(
        name="scripted",
        version="1",
        model=MODEL,
        weights="w",
        kv_compat="k",
        capabilities=Capabilities(seed=True, n=True, exact_resume=True),
        context_length=CONTEXT,
        vocab_size=VOCAB.stop,
        block_tokens=BLOCK_TOKENS,
        eos_ids=frozenset({EOS}),
        step_tokens=STEP_TOKENS,
        max_batch=shape.max_batch,
    )
    return StepEngine(info, pool, runner, ChunkedScheduler(max_batch=shape.max_batch, max_tokens=STEP_TOKENS), clock)
