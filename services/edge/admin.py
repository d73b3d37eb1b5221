"""What operators ask of an edge: `hr.admin.edge.<id>.status|metrics|drain|undrain|jobs|cancel|quarantine`."""

from __future__ import annotations

import asyncio

from schemas.admin import QuarantinePage, QuarantineQuestion
from schemas.subjects import Subjects
from services.bus.drain_verbs import drain_verbs
from services.bus.interface import Msg
from services.bus.job_verbs import cut, job_verbs
from services.bus.micro import Service
from services.bus.micro_endpoint import ServiceHandler
from services.bus.nats_bus import NatsBus
from services.bus.questions import asks_nothing, read
from services.edge.api.gate import Traffic
from services.edge.detached.jobs import DetachedJobs
from services.edge.jobs.supervisor import Supervisor
from services.edge.quarantine_bucket import QuarantineBucket
from services.edge.status import Status, status
from services.settings.settings import Settings
from services.telemetry.metrics import Metrics


def admin_service(
    bus: NatsBus,
    traffic: Traffic,
    jobs: Supervisor,
    detached: DetachedJobs,
    refused: QuarantineBucket,
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

    async def quarantine(msg: Msg) -> QuarantinePage:
        asked = read(msg.data, QuarantineQuestion)
        cleared = await refused.clear(asked.clear) if asked.clear else []
        return _page(refused.held(), cleared, asked)

    about = {"model": ",".join(settings.served_names)}
    service = Service(bus, "headrace-edge", "0.1.0", "Headrace edge: HTTP in, jobs out", about)
    verbs: dict[str, ServiceHandler] = {
        "status": asks_nothing(say_status),
        "metrics": asks_nothing(say_metrics),
        "quarantine": quarantine,
        **job_verbs(bus.process, jobs.held.jobs, jobs.held.cancel),
        **drain_verbs(set_draining, stop),
    }
    for verb, handler in verbs.items():
        service.endpoint(verb, Subjects(settings.nats.prefix).admin("edge", bus.process, verb), handler)
    return service


def _page(held: dict[str, float], cleared: list[str], asked: QuarantineQuestion) -> QuarantinePage:
    shown, more = cut(held, str, asked.after, asked.limit)
    return QuarantinePage(held={key: round(held[key], 1) for key in shown}, total=len(held), cleared=cleared, next=more)
