"""An edge over a real router and real workers, all in this process on the in-memory bus; the test chooses the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from schemas.identity import process_id
from schemas.state import Role
from schemas.subjects import Subjects
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.memory_queue import MemoryWorkQueue
from services.bus.micro import Service
from services.bus.typed import Refusals
from services.clock import SystemClock
from services.decode.decode import Decode
from services.edge.api.app import create_app
from services.edge.gate.door import Door
from services.edge.gate.keyring import Keyring
from services.edge.jobs.supervisor import Supervisor
from services.edge.tenant import tenant
from services.engine.protocol import DecodeEngine
from services.kv.transfer.memory import MemoryTransferClient, MemoryTransferServer
from services.prefill.prefill import Prefill
from services.router.router import Router
from services.settings.settings import Settings
from services.telemetry.metrics import Metrics
from services.worker.service import Phase, run
from services.worker.worker import Worker
from tests.edge.fakes import MODEL, SECRET, Api
from tests.waiting import until

DRAIN_S = 1.0


@dataclass
class Stack:
    """`api.jobs` are not used: its application starts real ones."""

    api: Api
    edge: Supervisor
    workers: list[Worker]

    def clean(self) -> bool:
        """No run is left, and nothing but a prefix cache keeps a block."""
        for worker in self.workers:
            worker.engine.pool.check_integrity()
        free = all(worker.engine.pool.available == worker.engine.pool.total for worker in self.workers)
        return free and not len(self.edge) and not any(len(worker.runs) for worker in self.workers)


class _NoRegistry:
    async def ensure(self) -> None:
        return

    async def put(self, key: str, value: object) -> None:
        return


@asynccontextmanager
async def stack(engines: Mapping[Role, DecodeEngine]) -> AsyncIterator[Stack]:
    """`engines`: warm, one a role, of the model `MODEL`."""
    broker, clock, random, subjects = MemoryBroker(), SystemClock(), Random(5), Subjects()
    buses = {name: MemoryBus(broker, process_id(name, time.time(), random)) for name in ("e1", "r1", *engines)}
    queue, stop, refusals = MemoryWorkQueue(), asyncio.Event(), Refusals()
    network: dict[str, MemoryTransferServer] = {}
    workers, serving = list[Worker](), list[asyncio.Task[None]]()
    for role, engine in engines.items():
        worker = Worker(buses[role], subjects, engine, role, clock, Metrics.null())
        server, client = MemoryTransferServer(engine.pool, network, role, clock=clock), MemoryTransferClient(network)
        await server.start()
        phases: list[Phase] = []
        if role is not Role.DECODE:
            phases.append(Prefill(worker, engine, server, client).start)
        if role is not Role.PREFILL:
            phases.append(Decode(worker, engine, client, server).start)
        service = Service(buses[role], f"headrace-{role}", "0.1.0", "", clock=clock)
        work = run(worker, phases, refusals, _NoRegistry(), service, stop, DRAIN_S)  # type: ignore[arg-type]
        workers.append(worker)
        serving.append(asyncio.create_task(work))
    router = Router(buses["r1"], queue, Settings(model=MODEL), clock, random, refusals)
    await router.listen()
    await router.join()
    edge = Supervisor(buses["e1"], queue, subjects, clock, random, Metrics.null())
    await edge.open()
    api = Api()
    api.served = replace(api.served, jobs=edge)
    door = Door(Keyring(api.keys, SECRET, clock), lambda name: tenant(SECRET, name), open_on_loopback=True)
    api.app = create_app(api.served, api.traffic, door, lambda: "req-made")
    await until(lambda: edge.card(MODEL))
    try:
        yield Stack(api, edge, workers)
    finally:
        await edge.close(DRAIN_S)
        await router.drain()
        stop.set()
        await asyncio.gather(*serving)
