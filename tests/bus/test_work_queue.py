"""What `WorkQueue` promises, asked of the one in JetStream and the one in memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from schemas.errors import BusUnavailable, MessageTooLarge, NobodyListens
from schemas.subjects import Subjects
from services.bus.jetstream import JetStream, ttl_header
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.memory_queue import MemoryWorkQueue
from services.bus.nats_bus import connect
from services.bus.work_queue import Item, Put, WorkQueue
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S

ACK_WAIT_S = 60.0
"""Longer than any test: what was pulled is its puller's."""
BRIEF_S = 0.4
_streams = itertools.count()


@pytest.fixture
def ack_wait_s() -> float:
    return ACK_WAIT_S


@pytest.fixture(params=["jetstream", "memory"])
async def queue(request: pytest.FixtureRequest, ack_wait_s: float) -> AsyncIterator[WorkQueue]:
    """An empty queue for three jobs under prefix `hr`."""
    if request.param == "memory":
        yield MemoryWorkQueue(max_jobs=3, ack_wait_s=ack_wait_s)
        return
    server: NatsServer = request.getfixturevalue("nats_server")
    bus = await connect(server.url, "router-0000000000000", "router")
    js = JetStream(bus, timeout=PATIENCE_S)
    stream = f"JOBS{next(_streams)}"
    queue = JetStreamWorkQueue(js, Subjects(), stream=stream, max_jobs=3, ack_wait_s=ack_wait_s)
    await queue.ensure()
    yield queue
    await js.api(f"STREAM.DELETE.{stream}")
    await bus.close()


async def _put(queue: WorkQueue, job: str, *, lane: int = 1, ttl_s: float = 60.0, attempt: int = 1) -> Put:
    subject = Subjects().job("m", "free", lane, job)
    return await queue.put(subject, job.encode(), msg_id=f"{job}.{attempt}", ttl_s=ttl_s, headers={"Headrace-Edge": "e1"})


async def _pull(queue: WorkQueue, lane: int = 1) -> Item | None:
    return await queue.pull(f"{Subjects().lane('m', 'free', lane)}.>", f"m-free-{lane}")


async def _pull_soon(queue: WorkQueue) -> Item:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while loop.time() < deadline:
        item = await _pull(queue)
        if item is not None:
            return item
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing within {PATIENCE_S} s")


async def test_a_job_goes_through(queue: WorkQueue) -> None:
    assert await _pull(queue) is None
    assert await _put(queue, "a") is Put.QUEUED
    item = await _pull(queue)
    assert item is not None
    assert (item.subject, item.data, item.headers["Headrace-Edge"]) == ("hr.jobs.m.free.1.a", b"a", "e1")
    await item.ack()
    assert await queue.waiting("hr.jobs.>") == {}
    assert await _pull(queue) is None


async def test_the_same_job_twice_is_once(queue: WorkQueue) -> None:
    assert await _put(queue, "a") is Put.QUEUED
    assert await _put(queue, "a") is Put.DUPLICATE
    assert await _put(queue, "a", attempt=2) is Put.DUPLICATE
    assert await queue.waiting("hr.jobs.m.>") == {"hr.jobs.m.free.1.a": 1}


async def test_a_retry_after_it_was_pulled_and_acked_is_a_duplicate(queue: WorkQueue) -> None:
    await _put(queue, "a")
    item = await _pull(queue)
    assert item is not None
    await item.ack()
    assert await _put(queue, "a") is Put.DUPLICATE
    assert await _pull(queue) is None
    assert await _put(queue, "a", attempt=2) is Put.QUEUED


async def test_full_is_told_apart_from_duplicate(queue: WorkQueue) -> None:
    for job in "abc":
        assert await _put(queue, job) is Put.QUEUED
    assert await _put(queue, "d") is Put.FULL
    assert await _put(queue, "a", attempt=2) is Put.DUPLICATE
    assert await queue.purge("hr.jobs.m.free.1.b")
    assert await _put(queue, "d") is Put.QUEUED


async def test_order_is_kept_within_a_lane_and_lanes_are_apart(queue: WorkQueue) -> None:
    for job, lane in (("a", 1), ("b", 2), ("c", 1)):
        await _put(queue, job, lane=lane)
    pulled = [await _pull(queue, lane) for lane in (1, 1, 2, 1)]
    assert [item.data if item else None for item in pulled] == [b"a", b"c", b"b", None]


async def test_nak_makes_it_the_first_of_its_lane_at_once(queue: WorkQueue) -> None:
    for job in "abc":
        await _put(queue, job)
    first, second = await _pull(queue), await _pull(queue)
    assert first is not None
    assert second is not None
    await first.nak()
    again = await _pull(queue)
    assert again is not None
    assert again.data == b"a"
    third = await _pull(queue)
    assert third is not None
    assert third.data == b"c"


@pytest.mark.parametrize("ack_wait_s", [BRIEF_S])
async def test_a_job_whose_router_died_comes_back(queue: WorkQueue) -> None:
    await _put(queue, "a")
    assert await _pull(queue) is not None
    assert (await _pull_soon(queue)).data == b"a"


async def test_a_purged_job_is_gone_pulled_or_not(queue: WorkQueue) -> None:
    await _put(queue, "a")
    await _put(queue, "b")
    held = await _pull(queue)
    assert held is not None
    assert await queue.purge("hr.jobs.m.free.1.a")
    assert await queue.purge("hr.jobs.m.free.1.b")
    assert not await queue.purge("hr.jobs.m.free.1.b")
    await held.nak()
    assert await _pull(queue) is None
    assert await queue.waiting("hr.jobs.>") == {}


@pytest.mark.parametrize("cancelled", ["a", "c"], ids=["before", "after"])
async def test_a_purged_job_loses_no_other_that_was_given_back(queue: WorkQueue, cancelled: str) -> None:
    """nats-server's own purge by subject takes what was given back to the consumer with it: it is never delivered again."""
    for job in "abc":
        await _put(queue, job)
    first, second = await _pull(queue), await _pull(queue)
    assert first is not None
    assert second is not None
    await (second if cancelled == "a" else first).nak()
    assert await queue.purge(f"hr.jobs.m.free.1.{cancelled}")
    kept = await _pull(queue)
    assert kept is not None
    assert kept.data == (b"b" if cancelled == "a" else b"a")


async def test_an_expired_job_is_rubbish(queue: WorkQueue) -> None:
    began = time.perf_counter()  # the server's time does not stand still with us
    await _put(queue, "a", ttl_s=0.2)
    async with asyncio.timeout(PATIENCE_S):
        while await queue.waiting("hr.jobs.>"):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.02)
    assert time.perf_counter() - began > 0.5  # at least a second
    assert await _pull(queue) is None


async def test_waiting_counts_what_the_filter_asks_for(queue: WorkQueue) -> None:
    await _put(queue, "a", lane=1)
    await _put(queue, "b", lane=2)
    assert await queue.waiting("hr.jobs.m.free.1.>") == {"hr.jobs.m.free.1.a": 1}
    assert await queue.waiting("hr.jobs.other.>") == {}
    assert len(await queue.waiting("hr.jobs.>")) == 2


async def test_ensure_again_keeps_what_is_there(queue: WorkQueue) -> None:
    await _put(queue, "a")
    await queue.ensure()
    assert len(await queue.waiting("hr.jobs.>")) == 1


# JetStream alone


async def test_a_server_that_hangs_or_is_gone_costs_the_deadline_no_more(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server.url, "router-0000000000000", "router")
    js = JetStream(bus, timeout=PATIENCE_S)
    queue = JetStreamWorkQueue(js, Subjects())
    await queue.ensure()
    await _put(queue, "a")
    item = await _pull(queue)
    assert item is not None
    js.timeout = 0.2

    async def all_raise() -> None:
        for call in (
            _put(queue, "b"),
            _pull(queue),
            queue.waiting("hr.>"),
            queue.purge("hr.jobs.x"),
            queue.ensure(),
            item.ack(),
            item.nak(),
        ):
            with pytest.raises(BusUnavailable):
                await asyncio.wait_for(call, PATIENCE_S)

    own_nats_server.pause()
    await all_raise()
    own_nats_server.kill()
    await all_raise()
    await bus.close()


async def test_a_stream_lost_in_a_crash_is_made_again_by_whoever_pulls(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server.url, "router-0000000000000", "router")
    js = JetStream(bus, timeout=PATIENCE_S)
    queue = JetStreamWorkQueue(js, Subjects())
    with pytest.raises(NobodyListens):  # an edge makes no streams
        await _put(queue, "a")
    assert await _pull(queue) is None
    assert await _put(queue, "a") is Put.QUEUED
    await js.api("STREAM.DELETE.HR_JOBS")
    assert await queue.waiting("hr.jobs.>") == {}
    assert await _put(queue, "b") is Put.QUEUED
    item = await _pull(queue)
    assert item is not None
    assert item.data == b"b"
    await bus.close()


async def test_a_job_that_answers_too_late_goes_back_at_once(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server.url, "router-0000000000000", "router")
    js = JetStream(bus, timeout=PATIENCE_S)
    queue = JetStreamWorkQueue(js, Subjects(), ack_wait_s=60.0)
    assert await _pull(queue) is None
    await _put(queue, "a")
    js.timeout = 0.2
    own_nats_server.pause()
    with pytest.raises(BusUnavailable):
        await _pull(queue)
    js.timeout = PATIENCE_S
    own_nats_server.resume()
    assert (await _pull_soon(queue)).data == b"a"
    await bus.close()


async def test_two_routers_share_one_consumer_and_no_job(nats_server: NatsServer) -> None:
    buses = [await connect(nats_server.url, f"r{n}-0000000000000", "router") for n in range(2)]
    queues = [JetStreamWorkQueue(JetStream(bus, timeout=PATIENCE_S), Subjects("two"), stream="TWO") for bus in buses]
    await queues[0].ensure()
    for n in range(40):
        await queues[0].put(f"two.jobs.m.free.1.{n}", b"%d" % n, msg_id=f"{n}.1", ttl_s=60.0)

    async def pull_all(queue: JetStreamWorkQueue) -> list[bytes]:
        got = []
        while (item := await queue.pull("two.jobs.m.free.1.>", "m-free-1")) is not None:
            got.append(item.data)
            await item.ack()
        return got

    one, two = await asyncio.gather(*(pull_all(queue) for queue in queues))
    assert sorted(one + two) == sorted(b"%d" % n for n in range(40))
    for bus in buses:
        await bus.close()


async def test_a_job_larger_than_the_server_takes_is_refused_here(nats_server: NatsServer) -> None:
    bus = await connect(nats_server.url, "e1-0000000000000", "edge")
    with pytest.raises(MessageTooLarge):
        await JetStreamWorkQueue(JetStream(bus), Subjects()).put("hr.jobs.x", bytes(2**21), msg_id="x.1", ttl_s=1.0)
    await bus.close()


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30.0, "30")])
def test_ttl_is_whole_seconds_rounded_up(seconds: float, header: str) -> None:
    assert ttl_header(seconds) == header
