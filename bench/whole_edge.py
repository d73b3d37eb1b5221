"""A whole edge inside a bench's own process, from its bus to its application; its far side is played (`bench.far_side`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random

from starlette.types import ASGIApp

from bench.far_side import FarSide
from schemas.identity import process_id
from schemas.job import Sampling, Tier, pack_ids
from schemas.subjects import Subjects
from services.bus.counters import Count
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.memory_queue import MemoryWorkQueue
from services.clock import SystemClock
from services.edge.api.app import create_app
from services.edge.api.gate import Traffic
from services.edge.api.served import Served
from services.edge.gate.budgets import Budgets
from services.edge.gate.door import Door
from services.edge.gate.keyring import Keyring
from services.edge.gate.meter import Meter, Reservation
from services.edge.gate.records import Caller
from services.edge.jobs.draft import Draft, Limits
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.supervisor import Supervisor
from services.edge.store.database import Database, database_url
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import migrate
from services.edge.store.usage import SqlUsageStore
from services.edge.tenant import tenant
from services.edge.text_model import TextModel
from services.settings.edge import EdgeSettings
from services.telemetry.collector import keep_collections_short
from services.telemetry.metrics import Metrics

PROMPT = range(500, 540)
_SECRET = bytes(32)


@dataclass(frozen=True)
class WholeEdge:
    served: Served
    jobs: Supervisor
    bus: MemoryBus
    app: ASGIApp
    far: FarSide

    def start(self, tokens: int) -> JobHandle:
        """A job of so many tokens, without HTTP."""
        caller = self.caller
        sampling, limits = Sampling(seed=7, max_tokens=tokens), Limits(60.0, 60.0, 120.0)
        return self.jobs.start(
            Draft(self.served.text.name, pack_ids(PROMPT), sampling, limits, caller.tenant.lane, caller.tenant.salt)
        )

    @property
    def caller(self) -> Caller:
        return Caller(tenant(_SECRET), Tier.PAID)

    def reservation(self) -> Reservation:
        return self.served.meter.nothing(self.caller)


@asynccontextmanager
async def whole_edge(model: str, folder: Path, scratch: Path) -> AsyncIterator[WholeEdge]:
    """It serves `model`, whose tokenizer lies in `folder`; its database is a file in `scratch`."""
    clock, random, metrics = SystemClock(), Random(1), Metrics.collecting("bench")
    text = TextModel.load(model, folder, clock)
    broker, process = MemoryBroker(), process_id("e1", 1.0, random)
    bus, database = MemoryBus(broker, process, role="edge"), Database(database_url("", scratch))
    jobs = Supervisor(bus, MemoryWorkQueue(), Subjects(), clock, random, metrics)
    budgets = Budgets(SqlUsageStore(database), process, clock, metrics)
    served = Served(EdgeSettings(), jobs, text, Meter(_no_counter, budgets, clock, metrics), clock, random, metrics, 0)
    door = Door(Keyring(SqlKeyStore(database), _SECRET, clock), lru_cache(16)(partial(tenant, _SECRET)), open_on_loopback=True)
    app = create_app(served, Traffic(), door, lambda: f"req-{random.getrandbits(96):024x}")
    far = FarSide(broker, process, model)
    await migrate(database)
    await jobs.open()
    await far.open()
    beside = [asyncio.create_task(work) for work in (budgets.run(), _report(far))]
    try:
        await asyncio.sleep(0.1)  # the first report is heard
        keep_collections_short()
        yield WholeEdge(served, jobs, bus, app, far)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await jobs.close(2.0)
        await database.close()
        text.close()


async def _report(far: FarSide) -> None:
    while True:
        far.report()
        await asyncio.sleep(0.5)


async def _no_counter(kind: str, owner: str, window: int, amount: int) -> Count:
    raise NotImplementedError("nobody here has limits")
