"""What a job is to pass through is away: routers, our connection, the queue. It may be back in a moment, and is waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from schemas.codec import decode
from schemas.errors import BusUnavailable, Unavailable
from schemas.job import Job
from schemas.placement import Queue
from schemas.reply import FinishReason
from schemas.state import ModelCard, QueueReport
from services.bus.uptime import Uptime
from services.clock import ManualClock
from services.edge.jobs.handle import admitted
from services.edge.jobs.models import ModelBoard
from tests.edge.cluster import CAPABILITIES, DECODE, FAST, MODEL, PREFILL, ROUTER, Cluster, collect, draft
from tests.waiting import until


async def test_no_router_is_503_at_once(cluster: Cluster) -> None:
    """Four tries in half a second if one was heard just now."""
    await cluster.deafen()
    handle = cluster.edge.start(draft())
    with pytest.raises(Unavailable) as caught:
        await handle.admitted()
    assert caught.value.retry_after == 1.0
    assert len(cluster.edge) == 0
    assert cluster.cancels == []


async def test_bus_down(cluster: Cluster) -> None:
    """Longer than it takes to find another server; then at once."""
    began = time.monotonic()
    cluster.edge_bus.disconnect()
    with pytest.raises(BusUnavailable) as caught:
        await cluster.edge.start(draft()).admitted()
    assert caught.value.retry_after == 1.0
    assert time.monotonic() - began > FAST.reconnect_s
    second = cluster.edge.start_detached("2" * 32, draft())
    with pytest.raises(BusUnavailable):
        await admitted(second)
    assert second.attempt == 1
    cluster.edge_bus.reconnect()


async def test_a_job_that_comes_while_we_reconnect_waits_for_it(cluster: Cluster) -> None:
    cluster.edge_bus.disconnect()
    handle = cluster.edge.start(draft())
    await asyncio.sleep(FAST.reconnect_s / 2)  # longer than the few attempts that new work is given otherwise
    assert cluster.jobs == []
    cluster.answers = [cluster.accept(1)]
    cluster.edge_bus.reconnect()
    await handle.admitted()
    job = cluster.jobs[0][1]
    assert not job.resume
    cluster.tokens(DECODE, job, 1, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


def test_what_is_served_is_not_forgotten_while_nobody_can_tell_us() -> None:
    """Nor before routers had the time to say it again."""
    clock = ManualClock()
    line = Uptime(clock)
    board, card = ModelBoard(clock, line, FAST), ModelCard(model=MODEL, capabilities=CAPABILITIES, context_length=512)
    board.hear(QueueReport(router=ROUTER, model=MODEL, card=card))
    line.went_down()
    clock.advance(10 * FAST.card_alive_s)
    assert (board.models(), board.routers()) == ([MODEL], [])
    line.came_up()
    clock.advance(FAST.card_alive_s / 2)
    assert board.card(MODEL) == card
    clock.advance(FAST.card_alive_s)
    assert (board.models(), board.card(MODEL)) == ([], None)


async def test_routers_that_were_heard_just_now_may_reconnect(cluster: Cluster) -> None:
    await cluster.deafen()
    handle = cluster.edge.start(draft())
    await until(lambda: handle._job.attempt > 1, what="nobody heard the first attempt")
    await cluster.listen()
    cluster.answers = [cluster.accept(1)]
    job = await cluster.submitted(1)
    assert job.attempt > 1
    cluster.tokens(DECODE, job, 1, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


@pytest.mark.parametrize("state", ["down", "leaderless"])
async def test_queue_unreachable(cluster: Cluster, state: str) -> None:
    """For longer than an election takes: then at once, for every other job too, until it is back."""
    setattr(cluster.queue, state, True)
    cluster.then = Queue(router=ROUTER)
    began = time.monotonic()
    for at_least in (FAST.queue_s, 0.0):
        with pytest.raises(Unavailable) as caught:
            await cluster.edge.start(draft()).admitted()
        assert caught.value.retry_after == 1.0
        assert time.monotonic() - began > at_least
    second = [job for _, job in cluster.jobs if job.job != cluster.jobs[0][1].job]
    assert [job.attempt for job in second] == [1]
    setattr(cluster.queue, state, False)
    handle = cluster.edge.start(draft())
    await handle.admitted()
    assert len(await cluster.queue.waiting("hr.jobs.>")) == 1
    handle.cancel()


async def test_a_job_that_the_queue_may_hold_is_put_again_as_the_same_attempt(cluster: Cluster) -> None:
    cluster.queue.down = True
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    await asyncio.sleep(3 * FAST.repeat_s)
    cluster.queue.down = False
    await handle.admitted()
    assert len(cluster.jobs) == 1
    item = await cluster.queue.pull("hr.jobs.>", "all")
    assert item is not None
    assert decode(item.data, Job).attempt == 1
    cluster.own(PREFILL, job, 1)
    cluster.tokens(PREFILL, job, 1, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_job_that_no_queue_keeps_is_offered_again_until_there_is_credit(cluster: Cluster) -> None:
    """More often than new work is tried that fails."""
    cluster.queue.leaderless = True
    cluster.answers = [*[Queue(router=ROUTER)] * (2 * FAST.fresh_attempts), cluster.accept(1)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    job = cluster.jobs[-1][1]
    assert job.attempt == len(cluster.jobs) == 2 * FAST.fresh_attempts + 1
    assert not job.resume
    cluster.own(PREFILL, job, 1)
    cluster.tokens(PREFILL, job, 1, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert cluster.cancels == []
