"""A job that its client gave up computes nothing, whatever state it was in."""

from __future__ import annotations

import asyncio

import pytest

from schemas.codec import decode
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Queue
from schemas.reply import FinishReason
from schemas.state import EdgeBeat
from services.edge.jobs import canceller
from services.edge.jobs.handle import JobCancelled
from tests.edge.cluster import DECODE, EDGE, FAST, PREFILL, ROUTER, Cluster, collect, draft
from tests.waiting import PATIENCE_S, until


async def test_while_submitted(cluster: Cluster) -> None:
    """The router took the job but its answer is not here yet; then a worker speaks up."""
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    handle.cancel()
    with pytest.raises(JobCancelled):
        await handle.next(PATIENCE_S)
    await until(lambda: cluster.cancels)
    await until(lambda: len(cluster.edge) == 0)
    assert not handle.began
    cluster.own(PREFILL, job, 1)
    await until(lambda: cluster.cancelled(PREFILL, 1))
    assert len(cluster.jobs) == 1


async def test_while_queued_each_router_is_told_until_it_answers(cluster: Cluster) -> None:
    cluster.acks = False
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    handle.cancel()
    await until(lambda: len(cluster.cancels) >= 3)
    assert len(cluster.edge) == 1
    cluster.acks = True
    await until(lambda: len(cluster.edge) == 0)
    cancel, count = cluster.cancels[0], len(cluster.cancels)
    assert (cancel.tier, cancel.lane, cancel.attempt) == ("paid", 3, 1)
    await asyncio.sleep(3 * FAST.repeat_s)
    assert len(cluster.cancels) == count


async def test_a_storm_of_cancels_is_repeated_more_slowly(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No router answers: each job is told of at once, and then as often as leaves the edge time to read answers."""
    monkeypatch.setattr(canceller, "MOST_PER_S", 100)
    cluster.acks = False
    cluster.then = Queue(router=ROUTER)
    handles = []
    for _ in range(300):  # one by one: a router's answer has 300 ms
        handles.append(cluster.edge.start(draft()))
        await handles[-1].admitted()
    for handle in handles:
        handle.cancel()
    await until(lambda: len({cancel.job for cancel in cluster.cancels}) == 300)
    first = len(cluster.cancels)
    await asyncio.sleep(10 * FAST.repeat_s)  # a time in which each would be repeated ten times
    assert len(cluster.cancels) - first < 300
    cluster.acks = True
    await until(lambda: len(cluster.edge) == 0)


async def test_while_queued_and_pulled_at_that_moment(cluster: Cluster) -> None:
    cluster.acks = False
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    await handle.admitted()
    handle.cancel()
    cluster.own(PREFILL, job, 1)
    await until(lambda: cluster.cancelled(PREFILL, 1))
    cluster.event(PREFILL, job, 1, 1, State.CANCELLED)
    await until(lambda: len(cluster.edge) == 0)


async def test_after_accepted_and_before_owned_both_are_told(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    handle.cancel()
    await until(lambda: cluster.cancelled(PREFILL, 1) and cluster.cancelled(DECODE, 1))


@pytest.mark.parametrize(
    ("hop", "owner", "state", "told"),
    [
        (1, PREFILL, State.PREFILLING, {PREFILL}),
        (1, PREFILL, State.HANDING_OFF, {PREFILL, DECODE}),
        (2, DECODE, State.HANDING_OFF, {PREFILL, DECODE}),
        (2, DECODE, State.DECODING, {DECODE}),
    ],
)
async def test_the_owner_is_told_until_it_confirms(cluster: Cluster, hop: int, owner: str, state: State, told: set[str]) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 1)
    cluster.event(owner, job, 1, hop, state)
    await until(lambda: cluster.edge._jobs[job.job].state is state)
    handle.cancel()
    await until(lambda: all(cluster.cancelled(who, 1) >= 3 for who in told))
    assert {who for who, _ in cluster.controls} == told
    cluster.event(owner, job, 1, hop, State.CANCELLED)
    await until(lambda: len(cluster.edge) == 0)
    assert cluster.cancels == []


async def test_a_cancel_that_nobody_confirms_is_bounded(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    await handle.admitted()
    handle.cancel()
    await until(lambda: len(cluster.edge) == 0)
    assert cluster.cancelled(DECODE, 1) >= 5


async def test_after_the_end_a_cancel_is_nothing(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, 1, 0, [5], finish=FinishReason.STOP)
    await collect(handle)
    handle.cancel()
    handle.cancel()
    await until(lambda: len(cluster.edge) == 0)
    assert cluster.controls == []
    assert cluster.cancels == []


async def test_a_job_that_was_given_up_has_no_next_attempt(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    cluster.tokens(DECODE, job, 1, 0, [5])
    await handle.next(PATIENCE_S)
    handle.cancel()
    cluster.event(DECODE, job, 1, 2, State.RETRY, reason="preempted")
    await until(lambda: len(cluster.edge) == 0)
    assert len(cluster.jobs) == 1


async def test_the_cancel_survives_a_short_loss_of_the_bus(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    await until(lambda: cluster.edge._jobs[job.job].hop == 2)
    cluster.edge_bus.disconnect()
    handle.cancel()
    await until(lambda: cluster.edge._jobs[job.job].closed)
    assert cluster.cancelled(DECODE, 1) == 0
    cluster.edge_bus.reconnect()
    await until(lambda: cluster.cancelled(DECODE, 1))


async def test_shutdown_cancels_and_says_goodbye(cluster: Cluster) -> None:
    beats: list[EdgeBeat] = []
    await cluster.bus.subscribe(f"hr.state.edge.{EDGE}", lambda msg: beats.append(decode(msg.data, EdgeBeat)))
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job: Job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    await handle.admitted()
    await until(lambda: beats)
    await cluster.edge.close(2.0)
    await until(lambda: beats[-1].left)
    assert cluster.cancelled(DECODE, 1) >= 1
    assert len(cluster.edge) == 0
