"""Detached jobs at the edge: submitted, read from anywhere, adopted, cancelled, forgotten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.codec import encode
from schemas.errors import EdgeFull, Gone, InvalidRequest, JobFailed, NotFound, StoreUnavailable, Unavailable
from schemas.lifecycle import State
from schemas.placement import Queue, Refused
from schemas.reply import FinishReason, Frames, by_operator
from schemas.state import Cause
from services.edge.jobs.explained import Explain
from services.edge.jobs.handle import JobCancelled
from services.edge.store.records import JobState, Retention
from tests.edge.cluster import DECODE, EDGE, ROUTER
from tests.edge.detached.rig import (
    ADOPTING,
    QUICK,
    SECOND,
    TENANT,
    Owner,
    Pair,
    attach,
    begun,
    long_draft,
    pair,
    read_all,
    state_is,
    written,
)
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def lease_s() -> float:
    return QUICK.lease_s


@pytest.fixture
async def edges(tmp_path: Path, lease_s: float) -> AsyncIterator[Pair]:
    async with pair(tmp_path, lease_s=lease_s) as made:
        yield made


# life


async def test_a_job_is_read_as_it_comes_and_after_its_end_from_both_edges(edges: Pair) -> None:
    job, owner = await begun(edges)
    readers = [await attach(side, job) for side in (edges.first, edges.first, edges.second)]
    reading = [asyncio.create_task(read_all(reader)) for reader in readers]
    owner.go_on(4)
    owner.go_on(3, FinishReason.STOP)
    assert await asyncio.gather(*reading) == [(owner.tokens(), FinishReason.STOP)] * 3
    await until(lambda: len(edges.first.detached) == 0)
    assert (await edges.row(job)).state is JobState.FINISHED
    for side in (edges.first, edges.second):
        assert await read_all(await attach(side, job, {0: 4})) == (owner.tokens()[4:], FinishReason.STOP)


async def test_the_message_says_that_it_is_detached(edges: Pair) -> None:
    _, owner = await begun(edges)
    assert owner.job.detached


async def test_nobody_waits_for_why_it_is_where_it_is(edges: Pair) -> None:
    await edges.first.detached.submit(replace(long_draft(), explain=Explain.ALL), TENANT)
    assert not (await edges.cluster.submitted(1)).explain


async def test_a_reader_that_leaves_stops_nothing(edges: Pair) -> None:
    job, owner = await begun(edges)
    reader = await attach(edges.first, job)
    await reader.next(PATIENCE_S)
    reader.cancel()
    with pytest.raises(JobCancelled):
        await reader.next(PATIENCE_S)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.first, job)) == (owner.tokens(), FinishReason.STOP)
    assert not owner.cancels


async def test_its_owner_hears_that_it_is_held(edges: Pair) -> None:
    _, owner = await begun(edges)
    await until(lambda: len(owner.held) >= 2)
    assert set(owner.held) == {EDGE}


async def test_what_is_refused_leaves_no_row(edges: Pair) -> None:
    edges.cluster.then = Refused(code="no_capacity", reason="full", retry_after=2.0)
    with pytest.raises(Unavailable):
        await edges.first.detached.submit(long_draft(), TENANT)
    await until(lambda: len(edges.first.detached) == 0)
    assert not await edges.store.adopt(SECOND, [EDGE], 1.0, 10)


async def test_an_edge_holds_so_many(edges: Pair) -> None:
    edges.first.detached._most = 0
    with pytest.raises(EdgeFull):
        await edges.first.detached.submit(long_draft(), TENANT)


async def test_a_failure_is_told_to_readers_everywhere(edges: Pair) -> None:
    job, owner = await begun(edges)
    edges.cluster.event(DECODE, owner.job, owner.run, 2, State.FAILED, error_code="job_failed")
    for side in (edges.first, edges.second):
        reader = await attach(side, job)
        assert [token for delta in await reader.next(PATIENCE_S) for token in delta.tokens] == owner.tokens()
        with pytest.raises(JobFailed):
            await read_all(reader)


# adoption


async def test_a_dead_edges_job_goes_on_where_it_is(edges: Pair) -> None:
    """Its owner goes on computing; tokens that no checkpoint had come again; nobody notices but by a pause."""
    job, owner = await begun(edges)
    reader = await attach(edges.second, job)
    await edges.first.kill()
    owner.go_on(5)  # nobody hears
    await until(lambda: len(edges.second.detached) == 1)
    await until(lambda: edges.second.supervisor._jobs[job].tokens.received() == 8)
    owner.go_on(2, FinishReason.STOP)
    assert await read_all(reader) == (owner.tokens(), FinishReason.STOP)
    assert not owner.cancels
    assert len(edges.cluster.jobs) == 1


async def test_several_jobs_of_one_owner_are_adopted_at_once(edges: Pair) -> None:
    """Each answer names one run; that it does not name the others is no sign that they are lost."""
    begun_jobs = [await begun(edges, run=run, digests=False) for run in range(7, 12)]
    await edges.first.kill()
    await until(lambda: len(edges.second.detached) == 5)
    await until(lambda: not any(job.joining for job in edges.second.supervisor._jobs.values()))
    edges.second.supervisor._vigil.look()
    for job, owner in begun_jobs:
        owner.go_on(2, FinishReason.STOP)
        assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
    assert len(edges.cluster.jobs) == 5


@pytest.mark.parametrize("lease_s", [60.0])
async def test_a_proven_death_is_acted_on_before_the_lease_ends(edges: Pair) -> None:
    job, owner = await begun(edges)
    await edges.first.kill()
    edges.cluster.die(EDGE, Cause.KILLED)
    await until(lambda: len(edges.second.detached) == 1)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


async def test_with_its_owner_gone_too_it_is_resumed_as_a_new_attempt(edges: Pair) -> None:
    edges.cluster.answers = [edges.cluster.accept(7, prefill="")]
    count = len(edges.cluster.jobs)
    submitting = asyncio.create_task(edges.first.detached.submit(long_draft(), TENANT))
    first = await edges.cluster.submitted(count + 1)
    edges.cluster.own(DECODE, first, 7, hop=2, state=State.DECODING)
    job = await submitting
    edges.cluster.tokens(DECODE, first, 7, 0, [100, 101])
    await written(edges, job, 2)
    await edges.first.kill()
    resumed = await edges.cluster.submitted(count + 2)
    assert resumed.attempt > first.attempt
    assert (resumed.resume, resumed.detached, resumed.weights, resumed.edge) == (True, True, "w", SECOND)
    assert resumed.choices[0].generated == (100, 101)
    owner = Owner(edges.cluster, resumed)
    await owner.listen()
    owner.go_on(2, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


async def test_a_job_that_nobody_owned_is_taken_out_of_the_queue_first(edges: Pair) -> None:
    edges.cluster.then = Queue(router=ROUTER)
    job = await edges.first.detached.submit(long_draft(), TENANT)
    await edges.first.kill()
    edges.cluster.report()
    edges.cluster.then = edges.cluster.accept(7, prefill="")
    again = await edges.cluster.submitted(2)
    assert [cancel.job for cancel in edges.cluster.cancels] == [job] * len(edges.cluster.cancels)
    assert max(cancel.attempt for cancel in edges.cluster.cancels) < again.attempt
    owner = Owner(edges.cluster, again)
    await owner.listen()
    owner.go_on(2, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


async def test_a_leftover_of_an_earlier_attempt_is_stopped_not_adopted(edges: Pair) -> None:
    """Two workers answer; one stood still while the edge went on without it."""
    job, stale = await begun(edges)
    edges.cluster.answers = [edges.cluster.accept(8, prefill="")]
    stale.retry()
    resumed = await edges.cluster.submitted(2)
    edges.cluster.own(DECODE, resumed, 8, hop=2, state=State.DECODING)
    edges.cluster.tokens(DECODE, resumed, 8, 3, [103])
    await written(edges, job, 4)
    await edges.first.kill()
    third = await edges.cluster.submitted(3)
    assert stale.cancels
    assert third.attempt > resumed.attempt
    assert third.choices[0].generated == (100, 101, 102, 103)


@pytest.mark.parametrize("lease_s", [60.0])
async def test_an_edge_that_leaves_hands_over_at_once(edges: Pair) -> None:
    job, owner = await begun(edges)
    owner.go_on(2)
    await until(lambda: edges.first.supervisor._jobs[job].tokens.received() == 5)
    await edges.first.detached.close()
    assert (await edges.row(job)).edge in (EDGE, SECOND)
    await until(lambda: len(edges.second.detached) == 1)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
    assert not owner.cancels


async def test_a_job_that_waits_for_its_admission_is_handed_over_too(edges: Pair) -> None:
    """Its row stands, so it is accepted, whoever computes it."""
    edges.cluster.answers = [None]
    submitting = asyncio.create_task(edges.first.detached.submit(long_draft(), TENANT))
    await edges.cluster.submitted(1)
    await edges.first.detached.close()
    job = await submitting
    edges.cluster.report()
    again = await edges.cluster.submitted(2)
    owner = Owner(edges.cluster, again)
    await owner.listen()
    owner.go_on(2, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


async def test_an_edge_that_drains_adopts_nothing(edges: Pair) -> None:
    job, owner = await begun(edges)
    edges.second.detached.adopts = False
    await edges.first.detached.close()
    for _ in range(3):
        await edges.second.detached._adoption.look()
    assert len(edges.second.detached) == 0
    edges.second.detached.adopts = True
    await until(lambda: len(edges.second.detached) == 1)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


async def test_a_lost_lease_ends_all_answering(edges: Pair) -> None:
    """Another edge holds the row: this one starts no attempt, cancels nothing, says nothing of the job. It can still be read."""
    job, owner = await begun(edges)
    reader = await attach(edges.first, job)
    assert await edges.store.adopt(SECOND, [EDGE], 60.0, 10)
    await until(lambda: len(edges.first.detached) == 0)
    assert len(edges.first.supervisor) == 0
    held, submitted = len(owner.held), len(edges.cluster.jobs)
    owner.go_on(5)  # still said to the edge that lost it
    owner.retry()
    await asyncio.sleep(0.3)
    assert (len(owner.held), len(edges.cluster.jobs), owner.cancels) == (held, submitted, 0)
    assert [token for delta in await reader.next(PATIENCE_S) for token in delta.tokens] == [100, 101, 102]


async def test_cut_off_from_nats_an_edge_leaves_its_jobs_to_others(edges: Pair) -> None:
    job, owner = await begun(edges)
    edges.first.bus.disconnect()
    await until(lambda: len(edges.second.detached) == 1)
    owner.go_on(2, FinishReason.STOP)
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
    edges.first.bus.reconnect()
    assert not owner.cancels


# the database


async def test_a_database_that_is_locked_costs_no_token(edges: Pair) -> None:
    """For longer than the lease: the edge that holds the job lets it go, and takes it again when it can be written."""
    job, owner = await begun(edges)
    reader = await attach(edges.first, job)
    assert await reader.next(PATIENCE_S)
    async with edges.second.database.write():
        owner.go_on(4)
        assert [token for delta in await reader.next(PATIENCE_S) for token in delta.tokens] == [103, 104, 105, 106]
        await until(lambda: len(edges.first.detached) == 0)
        with pytest.raises(StoreUnavailable):
            await edges.first.detached.submit(long_draft(), TENANT)
    await until(lambda: len(edges.first.detached) + len(edges.second.detached) == 1)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.first, job)) == (owner.tokens(), FinishReason.STOP)
    assert not owner.cancels
    assert len(edges.cluster.jobs) == 1


async def test_what_ended_while_the_database_was_away_is_written_later(edges: Pair) -> None:
    job, owner = await begun(edges)
    async with edges.second.database.write():
        owner.go_on(4, FinishReason.STOP)
        await asyncio.sleep(2.5)  # longer than the lease
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
    assert len(edges.cluster.jobs) == 1


async def test_a_deleted_database_is_made_anew(tmp_path: Path) -> None:
    """What was in it is gone, so its jobs are stopped; new ones are taken, and edges see one another's again."""
    async with pair(tmp_path) as edges:
        lost, owner = await begun(edges)
        for file in os.listdir(tmp_path):
            os.unlink(tmp_path / file)
        await until(lambda: owner.cancels)
        await until(lambda: edges.first.detached.ready and edges.second.detached.ready)
        with pytest.raises(NotFound):
            await attach(edges.first, lost)
        job, owner = await begun(edges)
        owner.go_on(4, FinishReason.STOP)
        assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)


# ends


@pytest.mark.parametrize("side", ["first", "second"])
async def test_it_is_cancelled_from_any_edge(edges: Pair, side: str) -> None:
    job, owner = await begun(edges)
    reader = await attach(edges.second, job)
    await getattr(edges, side).detached.cancel(job, TENANT)
    await until(lambda: owner.cancels)
    with pytest.raises(JobCancelled):
        await read_all(reader)
    assert (await edges.row(job)).state is JobState.CANCELLED
    await getattr(edges, side).detached.cancel(job, TENANT)  # again: nothing to do


async def test_an_operators_cancel_is_as_its_callers_own(edges: Pair) -> None:
    job, owner = await begun(edges)
    readers = [await attach(side, job) for side in (edges.first, edges.second)]
    with pytest.raises(NotFound):
        edges.second.supervisor.held.cancel(job)
    edges.first.supervisor.held.cancel(job)
    await until(lambda: owner.cancels)
    for reader in readers:
        with pytest.raises(JobCancelled):
            await read_all(reader)
    await until(lambda: len(edges.first.detached) == 0)
    assert (await edges.row(job)).state is JobState.CANCELLED


async def test_a_cancel_waits_for_who_adopts_it(edges: Pair) -> None:
    job, owner = await begun(edges)
    await edges.first.kill()
    await edges.second.detached.cancel(job, TENANT)
    await until(lambda: owner.cancels)
    reader = await attach(edges.second, job)
    with pytest.raises(JobCancelled):
        await read_all(reader)


@pytest.mark.parametrize("dead", [False, True])
async def test_an_operators_cancel_waits_for_who_holds_the_job(edges: Pair, dead: bool) -> None:
    """It is heard by an edge that has not got the job, or not yet."""
    job, owner = await begun(edges)
    if dead:
        await edges.first.kill()
    await _by_an_operator_of_a_router(edges, job)
    await until(lambda: owner.cancels)
    await state_is(edges, job, JobState.CANCELLED)
    assert len(edges.cluster.jobs) == 1, "nothing is resumed"


async def _by_an_operator(edges: Pair, job: str) -> None:
    edges.second.supervisor.held.cancel(job)


async def _by_an_operator_of_a_router(edges: Pair, job: str) -> None:
    edges.cluster.bus.publish(edges.cluster.subjects.reply(SECOND), encode(Frames(process=ROUTER, events=(by_operator(job),))))


async def _by_its_caller(edges: Pair, job: str) -> None:
    await edges.second.detached.cancel(job, TENANT)


async def _by_a_deletion(edges: Pair, job: str) -> None:
    await edges.second.detached.delete(job, TENANT)


@pytest.mark.parametrize("end", [_by_an_operator, _by_an_operator_of_a_router, _by_its_caller, _by_a_deletion])
async def test_what_is_ended_while_it_is_adopted_is_stopped(tmp_path: Path, end: Callable[[Pair, str], Awaitable[None]]) -> None:
    """Its owner has not answered yet, so nobody could be told: it is told when it answers, not left to compute for nobody."""
    async with pair(tmp_path, timing=replace(ADOPTING, rejoin_s=0.3, rejoin_tries=100, cancel_s=20.0)) as edges:
        job, owner = await begun(edges)
        owner.deaf = True
        await edges.first.kill()
        await until(lambda: job in edges.second.supervisor._jobs)
        held = edges.second.supervisor._jobs[job]
        await end(edges, job)
        await until(lambda: held.closed)
        owner.deaf = False
        await until(lambda: owner.cancels)
        await until(lambda: len(edges.second.supervisor) == 0)
        assert len(edges.cluster.jobs) == 1, "nothing is resumed"
        if end is not _by_a_deletion:
            await state_is(edges, job, JobState.CANCELLED)


@pytest.mark.parametrize("side", ["first", "second"])
async def test_a_deleted_row_stops_the_run(edges: Pair, side: str) -> None:
    job, owner = await begun(edges)
    await getattr(edges, side).detached.delete(job, TENANT)
    await until(lambda: owner.cancels)
    await until(lambda: len(edges.first.detached) == 0)
    with pytest.raises(NotFound):
        await attach(edges.first, job)


async def test_a_job_is_its_tenants(edges: Pair) -> None:
    job, _ = await begun(edges)
    for forbidden in (edges.first.detached.attach, edges.first.detached.cancel, edges.first.detached.delete):
        with pytest.raises(NotFound):
            await forbidden(job, "another")
    with pytest.raises(NotFound):
        await attach(edges.first, "f" * 32)


@pytest.mark.parametrize("first", [{1: 0}, {0: -1}])
async def test_positions_are_checked(edges: Pair, first: dict[int, int]) -> None:
    job, _ = await begun(edges)
    with pytest.raises(InvalidRequest):
        await attach(edges.first, job, first)


async def test_a_position_beyond_the_end_is_said_to_be_one(edges: Pair) -> None:
    job, owner = await begun(edges)
    readers = [await attach(side, job, {0: 50}) for side in (edges.first, edges.second)]
    owner.go_on(1, FinishReason.STOP)
    for reader in readers:
        with pytest.raises(InvalidRequest, match="ends before"):
            await read_all(reader)


async def test_what_was_kept_long_enough_is_gone(tmp_path: Path) -> None:
    async with pair(tmp_path, retention=Retention(keep_s=0.5)) as edges:
        job, owner = await begun(edges)
        owner.go_on(1, FinishReason.STOP)
        assert (await read_all(await attach(edges.second, job)))[0] == owner.tokens()
        await state_is(edges, job, JobState.EXPIRED)
        with pytest.raises(Gone) as caught:
            await attach(edges.first, job)
        assert (caught.value.status, caught.value.type, caught.value.code) == (410, "invalid_request_error", "gone")
