"""The life of an edge process: load the text model, connect, serve HTTP until told to stop, drain."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from random import Random, SystemRandom

from schemas.subjects import QUARANTINE_BUCKET, Subjects
from services.bus.dialect import Dialect
from services.bus.drain_verbs import drain_verbs
from services.bus.interface import Msg
from services.bus.jetstream import JetStream
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.kv_registry import KvRegistry
from services.bus.micro import Service
from services.bus.micro_endpoint import ServiceHandler
from services.bus.nats_bus import Credentials, NatsBus, connect
from services.clock import Clock, SystemClock
from services.edge.api.app import create_app
from services.edge.api.gate import Traffic
from services.edge.api.served import Served
from services.edge.detached.jobs import DetachedJobs
from services.edge.http_server import HttpServer, free_port
from services.edge.jobs.supervisor import Supervisor
from services.edge.jobs.timing import Timing
from services.edge.nats_api.chat import NatsChat, chat_service
from services.edge.quarantine import TTL_S, Quarantine
from services.edge.quarantine_bucket import QuarantineBucket
from services.edge.status import Status, status
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from services.edge.store.migrate import migrate
from services.edge.store.records import Retention
from services.edge.tenant import server_secret, tenant
from services.edge.text_model import TextModel
from services.models.store import ModelStore
from services.settings import EdgeSettings, Settings
from services.telemetry import names
from services.telemetry.logs import fields
from services.telemetry.loop_lag import record_loop_lag
from services.telemetry.metrics import Metrics

_CANCEL_S = 2.0
_log = logging.getLogger("headrace.edge")


async def serve(settings: Settings, process: str, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then let running answers finish within the drain deadline.

    Raises `PortInUse` (an OSError), `ModelError`, `BusUnavailable`.
    """
    edge, nats = settings.edge, settings.nats
    free_port(edge.host, edge.port)
    clock, random, metrics = SystemClock(), SystemRandom(), Metrics.collecting(process)
    files = ModelStore(settings.home_dir, clock=clock).open(settings.model, weights=False)
    text = TextModel.load(files.name, files.folder, clock)
    secret = server_secret(settings.home_dir)
    whose, quarantine = tenant(secret), Quarantine(clock, secret)
    database = Database(database_url(edge.database_url, settings.home_dir))
    credentials = Credentials(nats.user, nats.password) if nats.user else None
    bus = await connect(
        nats.servers,
        process,
        "edge",
        credentials=credentials,
        timeout=nats.connect_timeout_s,
        clock=clock,
        metrics=metrics,
        dialect=Dialect(settings.schema_version, clock),
    )
    try:
        subjects = Subjects(nats.prefix)
        js = JetStream(bus, replicas=nats.replicas)
        timing = Timing(submit_s=edge.submit_timeout_s)
        jobs = Supervisor(bus, JetStreamWorkQueue(js, subjects), subjects, clock, random, metrics, timing, quarantine)
        await jobs.open()
        detached = _detached(database, jobs, bus, subjects, clock, random, metrics, edge)
        await detached.open()
        bucket = KvRegistry(js, QUARANTINE_BUCKET, ttl_s=TTL_S, about="Headrace: requests that are refused, by keyed hash")
        shared = QuarantineBucket(quarantine, bucket, bus, clock)
        await shared.open()
        beside = [asyncio.create_task(shared.run()), asyncio.create_task(record_loop_lag(metrics, clock.monotonic))]
        traffic = Traffic()
        metrics.gauge(names.REQUESTS_RUNNING, lambda: float(len(jobs)))
        metrics.gauge(names.REQUESTS_WAITING, lambda: float(jobs.models.waiting(files.name)))
        served = Served(edge, jobs, text, whose, clock, random, metrics, int(clock.wall()))
        app = create_app(served, traffic, lambda: f"req-{random.getrandbits(96):024x}")
        server = HttpServer(app, edge.host, edge.port)
        admin = _admin(bus, traffic, jobs, detached, settings, metrics, stop)
        await admin.start()
        over_nats = NatsChat(bus, subjects, served, traffic, partial(tenant, secret), random)
        chat = chat_service(bus, subjects, over_nats, edge.max_nats_requests, {"model": settings.model})
        await over_nats.open()
        await chat.start()
        await server.start()
        _log.info("serving", extra=fields(url=f"http://{edge.host}:{server.port}", model=files.name))
        await stop.wait()
        await _drain(traffic, jobs, detached, server, edge.drain_timeout_s)
        await chat.drain(_CANCEL_S)
        await over_nats.close()
        await admin.drain(_CANCEL_S)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    finally:
        text.close()
        await database.close()
        await bus.drain(_CANCEL_S)


def _detached(
    database: Database,
    jobs: Supervisor,
    bus: NatsBus,
    subjects: Subjects,
    clock: Clock,
    random: Random,
    metrics: Metrics,
    edge: EdgeSettings,
) -> DetachedJobs:
    retention = Retention(keep_s=edge.detached_keep_s, keep_bytes=edge.detached_keep_mb * 2**20)
    store, prepare = SqlJobStore(database), partial(migrate, database)
    return DetachedJobs(store, prepare, jobs, bus, subjects, clock, random, metrics, most=edge.detached_jobs, retention=retention)


def _admin(
    bus: NatsBus,
    traffic: Traffic,
    jobs: Supervisor,
    detached: DetachedJobs,
    settings: Settings,
    metrics: Metrics,
    stop: asyncio.Event,
) -> Service:
    async def say_status(_: Msg) -> Status:
        return status(bus, traffic, jobs, detached)

    async def set_draining(draining: bool) -> Status:
        traffic.draining, detached.adopts = draining, not draining
        return status(bus, traffic, jobs, detached)

    async def say_metrics(_: Msg) -> bytes:
        return metrics.prometheus_text()

    service = Service(bus, "headrace-edge", "0.1.0", "Headrace edge: HTTP in, jobs out", {"model": settings.model})
    verbs: dict[str, ServiceHandler] = {"status": say_status, "metrics": say_metrics, **drain_verbs(set_draining, stop)}
    for verb, handler in verbs.items():
        service.endpoint(verb, Subjects(settings.nats.prefix).admin("edge", bus.process, verb), handler)
    return service


async def _drain(traffic: Traffic, jobs: Supervisor, detached: DetachedJobs, server: HttpServer, timeout: float) -> None:
    """Readiness first, then no new work, then the end of what runs; what does not end in time is cancelled."""
    traffic.draining, detached.adopts = True, False
    if not await traffic.idle(timeout):
        _log.warning("requests outlived the drain deadline", extra=fields(requests=traffic.running))
    await detached.close()
    await jobs.close(_CANCEL_S)
    await traffic.idle(_CANCEL_S)
    await server.stop(_CANCEL_S)
