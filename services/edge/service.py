"""The life of an edge process: load the text model, connect, serve HTTP until told to stop, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from random import Random, SystemRandom

from schemas.subjects import QUARANTINE_BUCKET, Subjects
from services.bus.counters import Counters
from services.bus.jetstream import JetStream
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.kv_registry import KvRegistry
from services.bus.nats_bus import NatsBus
from services.bus.service_connection import connect_service
from services.clock import Clock, SystemClock
from services.edge.admin import admin_service
from services.edge.api.admin_app import create_admin_app
from services.edge.api.app import create_app
from services.edge.api.gate import Traffic
from services.edge.api.served import Served
from services.edge.detached.jobs import DetachedJobs
from services.edge.gate.accounts import Accounts
from services.edge.gate.budgets import Budgets
from services.edge.gate.door import Door
from services.edge.gate.keyring import Keyring
from services.edge.gate.losses import watch_for_losses
from services.edge.gate.meter import Meter
from services.edge.gate.retention import forget_old
from services.edge.http_server import Bounds, HttpServer, free_port
from services.edge.jobs.supervisor import Supervisor
from services.edge.jobs.timing import Timing
from services.edge.nats_api.chat import NatsChat, chat_service
from services.edge.quarantine import TTL_S, Quarantine
from services.edge.quarantine_bucket import QuarantineBucket
from services.edge.responses.routes import add_responses
from services.edge.store.accounts import SqlAccountStore
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import migrate
from services.edge.store.records import Retention
from services.edge.store.usage import SqlUsageStore
from services.edge.tenant import server_secret, tenant
from services.edge.text_model import TextModel
from services.models.obtain import obtain, unless_stopped
from services.models.progress import Logged
from services.settings.edge import EdgeSettings
from services.settings.settings import Settings
from services.telemetry import names
from services.telemetry.logs import fields
from services.telemetry.loop_lag import record_loop_lag
from services.telemetry.metrics import Metrics

_CANCEL_S = 2.0
_DAY_S = 86_400.0
_TENANTS = 4096
"""Whose lane and salt are remembered."""
_FEW = Bounds(connections=64, headers_s=75.0, write_s=10.0)
"""Of the connections of operators' programs."""
_log = logging.getLogger("headrace.edge")


async def serve(settings: Settings, process: str, stop: asyncio.Event, loaded: Callable[[], None]) -> None:
    """Serve until `stop` is set, then let running answers finish within the drain deadline. `loaded` is called before the first.

    Raises `PortInUse` (an OSError), `ModelError`, `BusUnavailable`.
    """
    edge, nats = settings.edge, settings.nats
    free_port(edge.host, edge.port)
    free_port(edge.admin_host, edge.admin_port, "ADMIN_PORT")
    clock, random, metrics = SystemClock(), SystemRandom(), Metrics.collecting(process)
    texts = await unless_stopped(stop, _load(settings, clock, random, metrics))
    if texts is None:  # told to stop before there was anything to serve
        return
    text = next(iter(texts.values()))
    secret = server_secret(settings.home_dir)
    whose, quarantine = lru_cache(_TENANTS)(partial(tenant, secret)), Quarantine(clock, secret)
    database = Database(database_url(edge.database_url, settings.home_dir))
    bus = await connect_service(settings, process, "edge", clock, metrics)
    beside: list[asyncio.Task[None]] = []
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
        keyring = Keyring(SqlKeyStore(database), secret, clock)
        door = Door(keyring, whose, open_on_loopback=edge.open_on_loopback)
        accounts = Accounts(SqlAccountStore(database), whose, clock)
        ledger = SqlUsageStore(database)
        budgets = Budgets(ledger, process, clock, metrics)
        counters = Counters(js, subjects)
        meter = Meter(counters.add, budgets, clock, metrics)
        work = (
            shared.run(),
            keyring.run(),
            accounts.run(),
            budgets.run(),
            watch_for_losses(counters.add, meter.allotments, clock),
            forget_old(ledger, edge.usage_keep_days * _DAY_S, random, metrics),
            record_loop_lag(metrics, clock.monotonic),
        )
        beside += [asyncio.create_task(each) for each in work]
        traffic = Traffic()
        metrics.gauge(names.REQUESTS_RUNNING, lambda: float(len(jobs)))
        metrics.gauge(names.REQUESTS_WAITING, lambda: float(sum(map(jobs.models.waiting, texts))))
        started = int(clock.wall())
        served = Served(edge, jobs, text, meter, clock, random, metrics, started, texts, settings.selection)
        app = create_app(served, traffic, door, lambda: f"req-{random.getrandbits(96):024x}")
        background = add_responses(app, served, detached, database)
        beside.append(asyncio.create_task(background.run()))
        server = HttpServer(app, edge.host, edge.port, Bounds.of(edge))
        probes = HttpServer(create_admin_app(served, traffic), edge.admin_host, edge.admin_port, _FEW)
        admin = admin_service(bus, traffic, jobs, detached, shared, settings, metrics, stop)
        await admin.start()
        over_nats = NatsChat(bus, subjects, served, traffic, accounts, random)
        chat = chat_service(bus, subjects, over_nats, edge.max_nats_requests, {"model": ",".join(texts)})
        loaded()
        await over_nats.open()
        await chat.start()
        await probes.start()
        await server.start()
        _log.info("serving", extra=fields(url=server.url, metrics=f"{probes.url}/metrics", models=",".join(texts)))
        await stop.wait()
        await _drain(traffic, jobs, detached, server, edge.drain_timeout_s)
        await background.close()
        await chat.drain(_CANCEL_S)
        await over_nats.close()
        await admin.drain(_CANCEL_S)
        await probes.stop(_CANCEL_S)
        await _end(beside)
        await budgets.close()
    finally:
        await _end(beside)  # also when not all of the edge could start
        for text in texts.values():
            text.close()
        try:
            await database.close()
        finally:
            await bus.drain(_CANCEL_S)


async def _load(settings: Settings, clock: Clock, random: Random, metrics: Metrics) -> dict[str, TextModel]:
    """By name, in the order of the settings; of what is fetched no weights. Raises `ModelError`."""
    began, progress = clock.monotonic(), Logged(_log, clock)
    each = [await obtain(settings, model, progress, clock, random, weights=False) for model in settings.served]
    took = clock.monotonic() - began
    metrics.gauge(names.MODEL_FETCH_TIME, lambda: took)
    return {files.name: TextModel.load(files.name, files.folder, clock) for files in each}


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


async def _drain(traffic: Traffic, jobs: Supervisor, detached: DetachedJobs, server: HttpServer, timeout: float) -> None:
    """Readiness first, then no new work, then the end of what runs; what does not end in time is cancelled."""
    traffic.draining, detached.adopts = True, False
    if not await traffic.idle(timeout):
        _log.warning("requests outlived the drain deadline", extra=fields(requests=traffic.running))
    await detached.close()
    await jobs.close(_CANCEL_S)
    await traffic.idle(_CANCEL_S)
    await server.stop(_CANCEL_S)
