"""What a router tells an operator: what it sees of each model, as JSON (`hr.admin.router.<id>.status`)."""

from __future__ import annotations

import asyncio

import msgspec

from services.bus.interface import Bus
from services.router.drain_rate import DrainRate
from services.router.placement_workers import Worker
from services.router.view import View
from services.router.waiting import Waiting


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`workers`: live ones, with this router's estimate of their credit. `drain_rate`: jobs/s."""

    workers: list[Worker]
    waiting: dict[str, int]
    drain_rate: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`writes`: the schema version of its messages. `tasks`: of the event loop, the answer itself included."""

    router: str
    draining: bool
    writes: int
    tasks: int
    models: dict[str, ModelStatus]


def status(bus: Bus, draining: bool, view: View, waiting: Waiting, drained: DrainRate) -> Status:
    """The state of every model with a live worker."""
    models = {
        model: ModelStatus(
            workers=sorted(view.workers(model), key=lambda worker: worker.process),
            waiting=waiting.by_tier(model),
            drain_rate=drained.of(model),
        )
        for model in sorted(view.models())
    }
    return Status(router=bus.process, draining=draining, writes=bus.dialect.writes, tasks=len(asyncio.all_tasks()), models=models)
