"""A router process as it is started, with a real nats-server and its JetStream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from schemas.codec import encode
from schemas.control import CancelAck
from schemas.errors import NoResponders
from schemas.placement import Accepted, Queue, SubmitAnswer
from schemas.state import QueueReport, Role
from services.bus.jetstream import JetStream
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.nats_bus import NatsBus, connect
from services.bus.typed import Refusals, ask, listen
from services.bus.work_queue import Put
from services.router.service import serve
from services.settings.nats import NatsSettings
from services.settings.settings import Settings
from tests.nats_fixture import NatsServer
from tests.router.fakes import EDGE, MODEL, SUBJECTS, FakeWorker, a_job, a_process
from tests.router.harness import a_cancel, eventually
from tests.waiting import PATIENCE_S, until

ROUTER = a_process("router")


@dataclass
class Site:
    edge: NatsBus
    worker: FakeWorker
    queue: JetStreamWorkQueue
    stop: asyncio.Event
    serving: asyncio.Task[None]


@pytest.fixture
async def site(own_nats_server: NatsServer) -> AsyncIterator[Site]:
    """A router that has seen its one worker."""
    edge = await connect(own_nats_server.url, EDGE, "edge")
    bus = await connect(own_nats_server.url, a_process("b1"), "decode")
    worker = await FakeWorker(bus, Role.BOTH).start()
    reports: list[QueueReport] = []
    await listen(edge, SUBJECTS.queue_any(), QueueReport, lambda report, _: reports.append(report), refusals=Refusals())
    stop = asyncio.Event()
    settings = Settings(model=MODEL, nats=NatsSettings(url=own_nats_server.url))
    serving = asyncio.create_task(serve(settings, ROUTER, stop, lambda: None))
    await until(lambda: reports)
    worker.beat()
    await until(lambda: any(report.card for report in reports))
    await eventually(lambda: _open(edge))
    worker.beat()  # all this may have taken longer than a worker may be silent
    await bus.flush(PATIENCE_S)
    yield Site(edge, worker, JetStreamWorkQueue(JetStream(edge, timeout=PATIENCE_S), SUBJECTS), stop, serving)
    stop.set()
    async with asyncio.timeout(PATIENCE_S):
        await serving
    await bus.close()
    await edge.close()


async def _open(edge: NatsBus) -> bool:
    """True once the router answers an operator, which it does last of all."""
    try:
        await edge.request(SUBJECTS.admin("router", ROUTER, "status"), b"{}", timeout=PATIENCE_S)
    except NoResponders:
        return False
    return True


async def _out_of_credit(site: Site) -> None:
    """The router has heard that there is none."""
    site.worker.full()
    await eventually(lambda: _is_queue(site))


async def _empty(queue: JetStreamWorkQueue) -> bool:
    return not await queue.waiting(SUBJECTS.jobs())


async def _nothing_waits(site: Site) -> bool:
    """So the router counts."""
    status = await site.edge.request(SUBJECTS.admin("router", ROUTER, "status"), b"{}", timeout=PATIENCE_S)
    return not msgspec.json.decode(status.data)["models"][MODEL]["waiting"]


async def _is_queue(site: Site) -> bool:
    return isinstance(await ask(site.edge, SUBJECTS.submit(MODEL), a_job(), SubmitAnswer, timeout=PATIENCE_S), Queue)


async def test_queued_until_credit_then_placed_and_gone(site: Site) -> None:
    await _out_of_credit(site)
    job = a_job(lane=4)
    subject = SUBJECTS.job(MODEL, job.tier, job.lane, job.job)
    assert await site.queue.put(subject, encode(job), msg_id=f"{job.job}.1", ttl_s=30.0) is Put.QUEUED
    site.worker.placed.clear()
    site.worker.free()
    await until(lambda: site.worker.placed)
    assert [placement.job for placement in site.worker.placed] == [job]
    await eventually(lambda: _empty(site.queue))


async def test_a_queued_job_is_purged_by_its_cancel(site: Site) -> None:
    await _out_of_credit(site)
    job = a_job()
    subject = SUBJECTS.job(MODEL, job.tier, job.lane, job.job)
    await site.queue.put(subject, encode(job), msg_id=f"{job.job}.1", ttl_s=30.0)
    ack = await ask(site.edge, SUBJECTS.cancel(), a_cancel(job), CancelAck, timeout=PATIENCE_S)
    assert (ack.router, ack.job, ack.purged) == (ROUTER, job.job, True)
    assert not await site.queue.waiting(SUBJECTS.jobs())


async def test_the_fast_path_and_what_an_operator_sees(site: Site) -> None:
    answer = await ask(site.edge, SUBJECTS.submit(MODEL), a_job(), SubmitAnswer, timeout=PATIENCE_S)
    assert isinstance(answer, Accepted)
    assert answer.decode == site.worker.process
    status = await site.edge.request(SUBJECTS.admin("router", ROUTER, "status"), b"{}", timeout=PATIENCE_S)
    models = msgspec.json.decode(status.data)["models"]
    assert [worker["process"] for worker in models[MODEL]["workers"]] == [site.worker.process]
    ping = await site.edge.request("$SRV.PING.headrace-router", b"{}", timeout=PATIENCE_S)
    assert msgspec.json.decode(ping.data)["id"] == ROUTER


async def test_a_drained_router_takes_nothing_until_it_is_undrained(site: Site) -> None:
    admin = lambda verb: site.edge.request(SUBJECTS.admin("router", ROUTER, verb), b"{}", timeout=PATIENCE_S)  # noqa: E731
    reports: list[QueueReport] = []
    await listen(site.edge, SUBJECTS.queue_any(), QueueReport, lambda report, _: reports.append(report), refusals=Refusals())
    assert msgspec.json.decode((await admin("drain")).data)["draining"]
    await site.edge.flush(PATIENCE_S)
    reports.clear()
    for subject in (SUBJECTS.submit(MODEL), SUBJECTS.router_submit(ROUTER)):
        with pytest.raises(NoResponders):
            await ask(site.edge, subject, a_job(), SubmitAnswer, timeout=PATIENCE_S)
    job = a_job()
    await site.queue.put(SUBJECTS.job(MODEL, job.tier, job.lane, job.job), encode(job), msg_id=f"{job.job}.1", ttl_s=30.0)
    site.worker.beat()
    ack = await ask(site.edge, SUBJECTS.cancel(), a_cancel(a_job()), CancelAck, timeout=PATIENCE_S)
    assert ack.router == ROUTER
    assert not reports
    assert not site.worker.placed
    assert msgspec.json.decode((await admin("drain")).data)["draining"]
    assert not msgspec.json.decode((await admin("undrain")).data)["draining"]
    site.worker.beat()
    await until(lambda: [placement.job for placement in site.worker.placed] == [job])
    await eventually(lambda: _nothing_waits(site))
    assert isinstance(await ask(site.edge, SUBJECTS.submit(MODEL), a_job(), SubmitAnswer, timeout=PATIENCE_S), Accepted)
    assert reports


async def test_a_router_that_ends_is_not_undrained(site: Site) -> None:
    site.stop.set()
    answer = await site.edge.request(SUBJECTS.admin("router", ROUTER, "undrain"), b"{}", timeout=PATIENCE_S)
    assert answer.headers["Nats-Service-Error-Code"] == "503"
