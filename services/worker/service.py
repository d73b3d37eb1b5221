"""The life of a worker process: subscribe, register, beat, serve until told to stop, drain.

Knows neither engine kinds nor roles: those come from the composition (`services.cli.worker`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from schemas.errors import BusUnavailable, JobFailed
from services.bus.drain_verbs import drain_verbs
from services.bus.interface import Msg
from services.bus.job_verbs import job_verbs
from services.bus.kv_registry import KvRegistry
from services.bus.micro import Service
from services.bus.micro_endpoint import ServiceHandler
from services.bus.questions import asks_nothing
from services.bus.typed import Refusals
from services.engine.protocol import EngineWorn
from services.worker.detached import Attendance
from services.worker.digests import send_digests
from services.worker.draining import drain
from services.worker.hearing import hear
from services.worker.held import Held
from services.worker.kvevents import KvEventFeed
from services.worker.status import WorkerStatus, register_gauges, status
from services.worker.steps import take_step
from services.worker.upkeep import keep_up
from services.worker.worker import Worker

_log = logging.getLogger(__name__)
REGISTER_S = 3.0

Phase = Callable[[Refusals], Awaitable[None]]


async def run(
    worker: Worker,
    phases: list[Phase],
    refusals: Refusals,
    registry: KvRegistry,
    service: Service,
    stop: asyncio.Event,
    drain_s: float,
) -> None:
    """Serve `phases` until `stop`, then drain for at most `drain_s` seconds. Raises what broke the engine."""
    worker.engine.start(partial(take_step, worker))
    await hear(worker, refusals)
    for start in phases:
        await start(refusals)
    kv_events = KvEventFeed(worker.bus, worker.subjects, worker.engine.pool)
    await kv_events.listen(refusals)
    worker.spawn(kv_events.run(), "kv events")
    worker.spawn(keep_up(worker), "upkeep")
    worker.spawn(Attendance(worker, refusals).run(), "attendance")
    worker.spawn(send_digests(worker.bus, worker.subjects, worker.runs, worker.stalls), "digests")
    worker.spawn(_register(worker, registry), "register")
    worker.spawn(worker.beats.run(), "beats")
    register_gauges(worker)
    await _serve_admin(worker, service, stop)
    try:
        await _until_stopped(worker, stop)
    except EngineWorn:
        await _leave(worker, service, drain_s)
        raise
    except Exception:
        worker.beats.draining = True
        worker.beats.say()  # routers choose it no more; its runs are their edges' to go on with, whom the death tells
        await worker.close()
        raise
    await _leave(worker, service, drain_s)


async def _leave(worker: Worker, service: Service, drain_s: float) -> None:
    await drain(worker, drain_s)
    await service.drain(1.0)
    await worker.close()


async def _until_stopped(worker: Worker, stop: asyncio.Event) -> None:
    """A worker whose engine broke computes nothing any more: the process ends, and whoever started it starts another."""
    stopped, broke = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(worker.engine.join())
    done, pending = await asyncio.wait({stopped, broke}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if broke in done:
        await broke
        raise JobFailed("the engine ended by itself")


async def _register(worker: Worker, registry: KvRegistry) -> None:
    """An entry in HR_WORKERS for `nats kv ls`; a worker serves without it when JetStream is away."""
    up_to_date = False
    while True:
        try:
            if not up_to_date:  # an older configuration, with other replicas for instance
                await registry.ensure()
                up_to_date = True
            await registry.put(worker.bus.process, worker.beats.state())
        except BusUnavailable as error:
            _log.info("not registered: %s", error)
        await asyncio.sleep(REGISTER_S)


async def _serve_admin(worker: Worker, service: Service, stop: asyncio.Event) -> None:
    """`hr.admin.<role>.<id>.status|metrics|drain|undrain|jobs|cancel`, and `$SRV` for `nats micro`."""

    async def say_status(_: Msg) -> WorkerStatus:
        return status(worker)

    async def set_draining(draining: bool) -> WorkerStatus:
        worker.beats.draining = draining
        worker.beats.say()
        return status(worker)

    async def say_metrics(_: Msg) -> bytes:
        return worker.metrics.prometheus_text()

    held = Held(worker)
    verbs: dict[str, ServiceHandler] = {
        "status": asks_nothing(say_status),
        "metrics": asks_nothing(say_metrics),
        **job_verbs(worker.bus.process, held.jobs, held.cancel),
        **drain_verbs(set_draining, stop),
    }
    for verb, handler in verbs.items():
        service.endpoint(verb, worker.subjects.admin(worker.role, worker.bus.process, verb), handler)
    await service.start()
