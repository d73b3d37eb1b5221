"""Owners that fall silent, runs that their digests do not mention, ends that were lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from schemas.errors import BusUnavailable
from schemas.job import Job
from schemas.lifecycle import State
from schemas.reply import Digest, DigestEntry, FinishReason
from schemas.state import Cause
from services.clock import ManualClock, SystemClock
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.supervisor import Supervisor
from services.telemetry.metrics import Metrics
from tests.edge.cluster import DECODE, FAST, PREFILL, ROUTER, Cluster, collect, draft
from tests.waiting import PATIENCE_S, until

RUN = 7


async def _owned(cluster: Cluster, who: str = DECODE, hop: int = 2) -> tuple[JobHandle, Job]:
    cluster.then = cluster.accept(RUN)
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(who, job, RUN, hop=hop)
    await until(lambda: handle._job.hop)
    return handle, job


def _entry(job: Job, state: State, run: int = RUN, attempt: int = 1, hop: int = 2, last: int = -1) -> DigestEntry:
    return DigestEntry(run=run, job=job.job, attempt=attempt, hop=hop, state=state, last=((0, last),) if last >= 0 else ())


async def _finish(cluster: Cluster, handle: JobHandle, attempt: int) -> None:
    job = await cluster.submitted(attempt)
    assert job.attempt == attempt
    assert job.resume
    cluster.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_silent_owner_is_given_up_after_3_s(watched: Cluster, clock: ManualClock) -> None:
    handle, _ = await _owned(watched)
    clock.advance(2.9)
    watched.report()
    await asyncio.sleep(0.01)
    watched.edge._vigil.look()
    assert handle._job.attempt == 1
    clock.advance(0.2)
    watched.edge._vigil.look()
    await _finish(watched, handle, 2)
    assert watched.cancelled(DECODE, RUN)  # if it lives, it shall not compute on


async def test_when_the_router_fell_silent_too_it_is_the_bus(watched: Cluster, clock: ManualClock) -> None:
    handle, _ = await _owned(watched)
    clock.advance(9.9)
    watched.edge._vigil.look()
    assert handle._job.attempt == 1
    clock.advance(0.2)
    watched.edge._vigil.look()
    await _finish(watched, handle, 2)


async def test_a_router_known_to_be_dead_says_nothing_about_the_bus(watched: Cluster, clock: ManualClock) -> None:
    handle, _ = await _owned(watched)
    watched.die(ROUTER, Cause.LEFT)
    await asyncio.sleep(0.01)
    clock.advance(3.1)
    watched.edge._vigil.look()
    await _finish(watched, handle, 2)


async def test_a_run_that_two_digests_of_its_owner_lack_is_lost(watched: Cluster) -> None:
    handle, job = await _owned(watched)
    other = Digest(process=DECODE)
    watched.digest(DECODE, other)
    watched.digest(PREFILL, Digest(process=PREFILL))
    watched.digest(PREFILL, Digest(process=PREFILL))
    await asyncio.sleep(0.01)
    watched.edge._vigil.look()
    assert handle._job.attempt == 1
    watched.digest(DECODE, Digest(process=DECODE, runs=(_entry(job, State.DECODING),)))
    watched.digest(DECODE, other)
    await asyncio.sleep(0.01)
    watched.edge._vigil.look()
    assert handle._job.attempt == 1
    watched.digest(DECODE, other)
    await asyncio.sleep(0.01)
    watched.edge._vigil.look()
    await _finish(watched, handle, 2)


async def test_a_digest_in_several_messages_is_one(watched: Cluster) -> None:
    handle, job = await _owned(watched)
    runs = (_entry(job, State.DECODING),)
    for _ in range(2):
        watched.digest(DECODE, Digest(process=DECODE))
        watched.digest(DECODE, Digest(process=DECODE, continued=True))
        watched.digest(DECODE, Digest(process=DECODE, continued=True, runs=runs))
    watched.digest(DECODE, Digest(process=DECODE))
    watched.digest(DECODE, Digest(process=DECODE, continued=True))
    await asyncio.sleep(0.01)
    watched.edge._vigil.look()
    assert handle._job.attempt == 1
    watched.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    await collect(handle)


async def test_a_digest_makes_an_owner_whose_word_was_lost(watched: Cluster) -> None:
    handle, job = await _owned(watched, PREFILL, hop=1)
    watched.digest(DECODE, Digest(process=DECODE, runs=(_entry(job, State.DECODING, last=1),)))
    await until(lambda: handle._job.owner == DECODE)
    await until(watched.replays)
    watched.tokens(DECODE, job, RUN, 0, [5, 6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)


async def test_an_end_that_only_the_digest_tells_is_asked_for(watched: Cluster) -> None:
    handle, job = await _owned(watched)
    watched.digest(DECODE, Digest(process=DECODE, runs=(_entry(job, State.RETRY),)))
    await until(watched.replays)
    watched.event(DECODE, job, RUN, 2, State.RETRY)
    await _finish(watched, handle, 2)


async def test_a_run_of_a_digest_that_nobody_wants_is_cancelled_unless_it_has_ended(watched: Cluster) -> None:
    handle, job = await _owned(watched)
    runs = (_entry(job, State.DECODING, run=8), _entry(job, State.CANCELLED, run=9))
    watched.digest(DECODE, Digest(process=DECODE, runs=runs))
    await until(lambda: watched.cancelled(DECODE, 8))
    assert not watched.cancelled(DECODE, 9)
    watched.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    await collect(handle)


async def test_a_disconnected_owner_is_left_at_once_and_it_is_no_death(watched: Cluster, clock: ManualClock) -> None:
    handle, _ = await _owned(watched)
    clock.advance(0.5)
    watched.report()
    await asyncio.sleep(0.01)
    watched.die(DECODE, Cause.DISCONNECTED)
    await _finish(watched, handle, 2)
    assert watched.cancelled(DECODE, RUN)  # it may compute on, and come back
    assert handle._job.deaths == 0


async def test_who_was_heard_since_is_not_disconnected(watched: Cluster, clock: ManualClock) -> None:
    handle, job = await _owned(watched)
    clock.advance(0.5)
    watched.tokens(DECODE, job, RUN, 0, [5])
    watched.report()
    await asyncio.sleep(0.01)
    watched.die(DECODE, Cause.DISCONNECTED)
    await asyncio.sleep(0.01)
    assert handle._job.attempt == 1
    watched.tokens(DECODE, job, RUN, 1, [6], finish=FinishReason.STOP)
    await collect(handle)


async def test_disconnected_together_with_the_router_it_is_the_bus(watched: Cluster, clock: ManualClock) -> None:
    handle, job = await _owned(watched)
    clock.advance(0.5)
    watched.die(DECODE, Cause.DISCONNECTED)
    await asyncio.sleep(0.01)
    assert handle._job.attempt == 1
    watched.tokens(DECODE, job, RUN, 0, [6], finish=FinishReason.STOP)
    await collect(handle)


@pytest.mark.parametrize(("state", "left"), [(State.DECODING, True), (State.HANDING_OFF, False)])
async def test_an_owner_whose_engine_stands_still_is_left(watched: Cluster, clock: ManualClock, state: State, left: bool) -> None:
    """What waits for a transfer does not wait for the engine."""
    handle, job = await _owned(watched)
    stalled = Digest(process=DECODE, runs=(_entry(job, state),), stalled=True)
    clock.advance(1.9)
    watched.digest(DECODE, stalled)
    await asyncio.sleep(0.01)
    assert handle._job.attempt == 1, "a new owner gets its time"
    clock.advance(0.2)
    watched.digest(DECODE, stalled)
    if left:
        await _finish(watched, handle, 2)
        assert watched.cancelled(DECODE, RUN)
        assert handle._job.deaths == 0
    else:
        await asyncio.sleep(0.01)
        assert handle._job.attempt == 1
        watched.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
        await collect(handle)


@pytest.mark.parametrize("owned", [True, False])
async def test_cut_off_for_too_long_a_job_ends_and_says_so(cluster: Cluster, owned: bool) -> None:
    timing = replace(FAST, cut_off_s=0.3)
    await cluster.edge.close(1.0)
    bus, queue, subjects = cluster.edge_bus, cluster.queue, cluster.subjects
    cluster.edge = Supervisor(bus, queue, subjects, SystemClock(), Random(1), Metrics.null(), timing)
    cluster.then = cluster.accept(RUN)
    await cluster.edge.open()
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    if owned:
        cluster.own(DECODE, job, RUN, hop=2)
        cluster.tokens(DECODE, job, RUN, 0, [5])
        assert [delta.tokens for delta in await handle.next(PATIENCE_S)] == [[5]]
    bus.disconnect()
    with pytest.raises(BusUnavailable) as caught:
        await handle.next(PATIENCE_S)
    assert caught.value.retry_after == 1.0
    assert bus.down_for() > (0.3 if owned else 0.0)  # what nobody owns yet needs no patience
    bus.reconnect()
