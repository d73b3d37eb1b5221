"""The life of a router process: connect, listen, join the queue group, serve until told to stop, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from random import SystemRandom

from schemas.errors import BusUnavailable
from schemas.explanation import Explanation
from schemas.subjects import Subjects
from services.bus.drain_verbs import drain_verbs
from services.bus.interface import Msg
from services.bus.jetstream import JetStream
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.job_verbs import job_verbs
from services.bus.micro import Service
from services.bus.micro_endpoint import ServiceHandler
from services.bus.nats_bus import NatsBus
from services.bus.questions import asks_nothing
from services.bus.service_connection import connect_service
from services.bus.typed import Refusals
from services.clock import SystemClock
from services.router.router import Router
from services.router.status import Status
from services.settings.settings import Settings
from services.telemetry.logs import fields
from services.telemetry.loop_lag import record_loop_lag
from services.telemetry.metrics import Metrics

WARM_UP_S = 0.5
"""Two beats of every worker: before that, a job would be refused for workers that are only not heard yet."""
_log = logging.getLogger(__name__)


async def serve(settings: Settings, process: str, stop: asyncio.Event, loaded: Callable[[], None]) -> None:
    """Route until `stop` is set; `loaded` is called before the first job.

    Raises `BusUnavailable` when NATS cannot be reached at the start.
    """
    nats = settings.nats
    clock, random, metrics = SystemClock(), SystemRandom(), Metrics.collecting(process)
    bus = await connect_service(settings, process, "router", clock, metrics)
    lag = asyncio.create_task(record_loop_lag(metrics, clock.monotonic))
    try:
        queue = JetStreamWorkQueue(JetStream(bus, replicas=nats.replicas), Subjects(nats.prefix))
        router = Router(bus, queue, settings, clock, random, Refusals(metrics, clock))
        admin = _admin(bus, router, settings, metrics, stop)
        loaded()
        await router.listen()
        ensuring = asyncio.create_task(_ensure(queue))
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_UP_S):
                await stop.wait()
        await router.join()
        await admin.start()
        _log.info("routing")
        await stop.wait()
        ensuring.cancel()
        await router.drain()
        await admin.drain(settings.router.drain_timeout_s)
    finally:
        lag.cancel()
        await bus.drain(settings.router.drain_timeout_s)


async def _ensure(queue: JetStreamWorkQueue) -> None:
    """Brings an older configuration of the stream up to date, other replicas for instance. What is missing is made on demand."""
    try:
        await queue.ensure()
    except BusUnavailable as error:
        _log.warning("the queue could not be brought up to date", extra=fields(error=error))


def _admin(bus: NatsBus, router: Router, settings: Settings, metrics: Metrics, stop: asyncio.Event) -> Service:
    async def say_status(_: Msg) -> Status:
        return router.status()

    async def say_metrics(_: Msg) -> bytes:
        return metrics.prometheus_text()

    async def set_draining(draining: bool) -> Status:
        await (router.leave() if draining else router.join())
        return router.status()

    async def explain(msg: Msg) -> Explanation:
        return router.explainer.answer(msg.data)

    async def eject(msg: Msg) -> Status:
        return router.eject(msg.data, True)

    async def readmit(msg: Msg) -> Status:
        return router.eject(msg.data, False)

    service = Service(
        bus, "headrace-router", "0.1.0", "Headrace router: where and when a job runs", {"model": ",".join(settings.served_names)}
    )
    verbs: dict[str, ServiceHandler] = {
        "status": asks_nothing(say_status),
        "metrics": asks_nothing(say_metrics),
        "explain": explain,
        "eject": eject,
        "readmit": readmit,
        **job_verbs(bus.process, router.held.jobs, router.held.cancel),
        **drain_verbs(set_draining, stop),
    }
    for verb, handler in verbs.items():
        service.endpoint(verb, Subjects(settings.nats.prefix).admin("router", bus.process, verb), handler)
    return service
