"""A cluster of three real servers loses one, two, or JetStream's data: what each costs a process on the bus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from schemas.errors import BusUnavailable, Disconnected, HeadraceError
from schemas.subjects import JOBS_STREAM, Subjects
from services.bus.interface import Bus, Msg
from services.bus.jetstream import ApiError, JetStream, Json
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.kv_registry import KvRegistry
from services.bus.nats_bus import connect
from services.bus.work_queue import Item, Put
from tests.nats_fixture import NatsCluster
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 1.0
R = TypeVar("R")


@pytest.fixture
async def buses(nats_cluster: NatsCluster) -> AsyncIterator[list[Bus]]:
    """One that asks and one that answers on `echo`."""
    made = [await connect(nats_cluster.url.split(","), f"{name}-0000000000000", "test") for name in ("a", "b")]
    asks, answers = made
    await answers.subscribe("echo", lambda msg: answers.publish(msg.reply, msg.data))
    await answers.flush(PATIENCE_S)
    yield [asks, answers]
    for bus in made:
        await bus.close()


async def eventually(call: Callable[[], Awaitable[R]], within: float = 30.0) -> R:
    """`call()`, again until it succeeds. Raises its last error."""
    deadline = time.monotonic() + within
    while True:
        try:
            return await call()
        except HeadraceError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def pulled(queue: JetStreamWorkQueue) -> Item:
    """The next job of the lane. A consumer that was just made may not see at once what is there, nor one whose leader is new."""

    async def one() -> Item:
        item = await queue.pull("hr.jobs.m.free.1.*", "m_free_1")
        if item is None:
            raise BusUnavailable("nothing yet")
        return item

    return await eventually(one)


async def echo(bus: Bus) -> Msg:
    return await bus.request("echo", b"?", timeout=TIMEOUT_S)


async def info(js: JetStream, stream: str) -> Json:
    """What JetStream says of `stream`, if it can now: while nobody leads all of it, it answers that it cannot."""
    try:
        return await js.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        raise BusUnavailable(str(error)) from error


async def leader(js: JetStream, stream: str) -> str:
    """The server that leads `stream`."""
    name = str((await info(js, stream))["cluster"].get("leader", ""))
    if not name:
        raise BusUnavailable("no leader now")
    return name


async def test_streams_and_buckets_have_their_replicas(buses: list[Bus]) -> None:
    js = JetStream(buses[0], timeout=TIMEOUT_S, replicas=3)
    queue, registry = JetStreamWorkQueue(js, Subjects()), KvRegistry(js, "HR_WORKERS")
    await eventually(queue.ensure)
    await eventually(registry.ensure)
    for stream in (JOBS_STREAM, "KV_HR_WORKERS"):
        found = await eventually(lambda stream=stream: info(js, stream))  # type: ignore[misc]
        assert found["config"]["num_replicas"] == 3
        assert len(found["cluster"]["replicas"]) == 2
    grown = JetStreamWorkQueue(JetStream(buses[0], timeout=TIMEOUT_S, replicas=1), Subjects())
    await eventually(grown.ensure)
    found = await eventually(lambda: info(js, JOBS_STREAM))
    assert found["config"]["num_replicas"] == 1


async def test_a_client_goes_on_at_another_server(nats_cluster: NatsCluster, buses: list[Bus]) -> None:
    for name in ("n1", "n2"):
        nats_cluster.nodes[name].kill()
        assert (await eventually(lambda: echo(buses[0]))).data == b"?"
        nats_cluster.start()


async def test_the_leader_dies(nats_cluster: NatsCluster, buses: list[Bus]) -> None:
    """Core NATS goes on; the queue answers again, with what was in it, once another server leads; no call hangs."""
    js = JetStream(buses[0], timeout=TIMEOUT_S, replicas=3)
    queue = JetStreamWorkQueue(js, Subjects())
    await eventually(queue.ensure)
    subject = Subjects().job("m", "free", 1, "a")
    await eventually(lambda: queue.put(subject, b"a", msg_id="a.1", ttl_s=60.0))
    nats_cluster.nodes[await eventually(lambda: leader(js, JOBS_STREAM))].kill()
    await eventually(lambda: echo(buses[0]))
    started = time.monotonic()

    async def it_waits() -> None:
        if await queue.waiting("hr.jobs.>") != {subject: 1}:
            raise BusUnavailable("a new leader has not read all of its log yet")

    await eventually(it_waits)
    item = await pulled(queue)
    await eventually(item.ack)
    print(f"\nthe queue answers again after {time.monotonic() - started:.1f} s")


async def test_quorum_is_lost_and_comes_back(nats_cluster: NatsCluster, buses: list[Bus]) -> None:
    """Every call of JetStream, also one that creates, fails within its deadline; core NATS goes on at what is left."""
    js = JetStream(buses[0], timeout=TIMEOUT_S, replicas=3)
    queue, fresh = JetStreamWorkQueue(js, Subjects()), JetStreamWorkQueue(js, Subjects("two"), stream="TWO")
    await eventually(queue.ensure)
    for name in ("n1", "n2"):
        nats_cluster.nodes[name].kill()
    await eventually(lambda: echo(buses[0]))
    subject = Subjects().job("m", "free", 1, "a")
    calls: list[Callable[[], Awaitable[object]]] = [
        fresh.ensure,
        lambda: queue.put(subject, b"a", msg_id="a.1", ttl_s=60.0),
        lambda: queue.pull("hr.jobs.m.free.1.*", "m_free_1"),
        lambda: queue.purge(subject),
    ]
    for call in calls:
        with pytest.raises((BusUnavailable, Disconnected)):
            await _repeated(call)
        assert (await eventually(lambda: echo(buses[0]))).data == b"?"
    nats_cluster.start()
    await eventually(fresh.ensure)
    put = await eventually(lambda: queue.put(subject, b"a", msg_id="a.1", ttl_s=60.0))
    assert put in (Put.QUEUED, Put.DUPLICATE)


async def _repeated(call: Callable[[], Awaitable[object]]) -> None:
    """For 10 s, until it raises: the server that is left may lead for a moment before it notices. No call may hang."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        async with asyncio.timeout(4 * TIMEOUT_S + PATIENCE_S):  # each call is at most four requests
            await call()
        await asyncio.sleep(0.1)


async def test_jetstream_comes_back_without_its_data(nats_cluster: NatsCluster, buses: list[Bus]) -> None:
    js = JetStream(buses[0], timeout=TIMEOUT_S, replicas=3)
    queue, registry = JetStreamWorkQueue(js, Subjects()), KvRegistry(js, "HR_WORKERS")
    await eventually(queue.ensure)
    await eventually(lambda: registry.put("d1-0000000000000", {"n": 1}))
    assert await eventually(lambda: queue.pull("hr.jobs.m.free.1.*", "m_free_1")) is None
    nats_cluster.kill()
    for node in nats_cluster.nodes.values():
        node.lose_data()
    nats_cluster.start()
    assert await eventually(lambda: queue.waiting("hr.jobs.>")) == {}
    subject = Subjects().job("m", "free", 1, "b")
    put = await eventually(lambda: queue.put(subject, b"b", msg_id="b.1", ttl_s=60.0))
    assert put in (Put.QUEUED, Put.DUPLICATE)  # the latter: it was stored, and the answer late
    item = await pulled(queue)
    assert item.data == b"b"
    await eventually(lambda: registry.put("d1-0000000000000", {"n": 2}))
    assert json.loads((await eventually(lambda: registry.get("d1-0000000000000"))) or b"{}") == {"n": 2}
