"""`headrace worker`: puts engine, bus, transfer and phases of a role together and serves."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable
from random import SystemRandom

from schemas.state import Role
from schemas.subjects import WORKERS_BUCKET, Subjects
from services.bus.interface import Bus
from services.bus.jetstream import JetStream
from services.bus.kv_registry import KvRegistry
from services.bus.micro import Service
from services.bus.service_connection import connect_service
from services.bus.typed import Refusals
from services.clock import Clock, SystemClock
from services.decode.decode import Decode
from services.engine.build import build_engine
from services.engine.protocol import DecodeEngine
from services.kv.transfer.auto import nixl_agent, open_carriers, transfer_client
from services.kv.transfer.server import SocketTransferServer
from services.models.obtain import obtain, unless_stopped
from services.models.partial import in_thread
from services.models.progress import Logged
from services.prefill.prefill import Prefill
from services.settings.errors import SettingsError
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings
from services.telemetry import names
from services.telemetry.loop_lag import record_loop_lag
from services.telemetry.metrics import Metrics
from services.worker.loading import answering
from services.worker.service import Phase, run
from services.worker.worker import Worker

_log = logging.getLogger("headrace.worker")


async def serve(settings: Settings, process: str, role: Role, stop: asyncio.Event, loaded: Callable[[], None]) -> None:
    """One worker of `role` until `stop` is set; `loaded` is called before its first job.

    Raises `ModelError`, `SettingsError`, `BusUnavailable`, OSError: why not.
    """
    clock, metrics = SystemClock(), Metrics.collecting(process)
    nixl = nixl_agent(settings.worker.transfer)
    client = transfer_client(settings.worker.transfer, nixl)
    nats = settings.nats
    bus = await connect_service(settings, process, role, clock, metrics)
    try:
        engine = await _load(settings, bus, role, clock, metrics, stop)
        if engine is None:  # told to stop before there was anything to serve
            return
        worker = Worker(bus, Subjects(nats.prefix), engine, role, clock, metrics, platform.node())
        server = SocketTransferServer(engine.pool, clock=clock)
        phases: list[Phase] = []
        if role is not Role.DECODE:
            phases.append(Prefill(worker, engine, server, client).start)
        if role is not Role.PREFILL:
            phases.append(Decode(worker, engine, client, server).start)
        await _listen(server, settings.worker)
        if engine.pool.block_bytes:  # else the engine moves its KV itself
            await open_carriers(server, settings.worker.transfer, nixl)
        refusals = Refusals(metrics, clock)
        registry = KvRegistry(JetStream(bus, replicas=nats.replicas), WORKERS_BUCKET)
        service = _service(bus, role, settings.model)
        worker.spawn(record_loop_lag(metrics, clock.monotonic), "loop lag")
        loaded()
        try:
            await run(worker, phases, refusals, registry, service, stop, settings.worker.drain_timeout_s)
        finally:
            await server.close()
    finally:
        client.close()
        if nixl is not None:
            nixl.close()
        await bus.drain(2.0)


async def _load(
    settings: Settings, bus: Bus, role: Role, clock: Clock, metrics: Metrics, stop: asyncio.Event
) -> DecodeEngine | None:
    """An engine that has answered its first request, and meanwhile an answer to whoever asks why this worker is not there yet.

    None when `stop` was set while the model was fetched. An engine that is being built is not interrupted, for what it has begun
    (ranks on other GPUs) only itself can end: a stop waits for it, and a second signal does not.
    """
    progress, weights = Logged(_log, clock), settings.worker.engine != "scripted"
    subject = Subjects(settings.nats.prefix).admin(role, bus.process, "status")
    async with answering(_service(bus, role, settings.model), subject, settings.model, progress):
        began = clock.monotonic()
        obtaining = obtain(settings, settings.model, progress, clock, SystemRandom(), weights=weights)
        files = await unless_stopped(stop, obtaining)
        if files is None:
            return None
        fetched = clock.monotonic()
        progress.begin(f"loading {settings.model} into the {settings.worker.engine} engine")
        engine = await in_thread(build_engine, files, settings, clock, role)
        await engine.warm_up()
        loaded = clock.monotonic()
    metrics.gauge(names.MODEL_FETCH_TIME, lambda: fetched - began)
    metrics.gauge(names.MODEL_LOAD_TIME, lambda: loaded - fetched)
    return engine


def _service(bus: Bus, role: Role, model: str) -> Service:
    return Service(bus, f"headrace-{role}", "0.1.0", f"Headrace {role} worker", {"model": model})


async def _listen(server: SocketTransferServer, worker: WorkerSettings) -> None:
    try:
        await server.start(worker.transfer_host, 0, advertise=worker.transfer_advertise)
    except OSError as error:
        raise SettingsError(f"worker.transfer_host: {worker.transfer_host}: {error.strerror or error}") from None
