"""Detached jobs at one edge: submitted, read from anywhere, refused, kept for a while."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from schemas.errors import EdgeFull, Gone, InvalidRequest, JobFailed, NotFound, Unavailable
from schemas.lifecycle import State
from schemas.placement import Refused
from schemas.reply import FinishReason
from services.edge.jobs.explained import Explain
from services.edge.jobs.handle import JobCancelled
from services.edge.store.records import JobState, Retention
from tests.edge.cluster import DECODE, EDGE
from tests.edge.detached.rig import SECOND, TENANT, Pair, attach, begun, long_draft, read_all, state_is
from tests.waiting import PATIENCE_S, until


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


async def test_what_was_kept_long_enough_is_gone(edges: Pair) -> None:
    job, owner = await begun(edges)
    owner.go_on(1, FinishReason.STOP)
    assert (await read_all(await attach(edges.second, job)))[0] == owner.tokens()
    await state_is(edges, job, JobState.FINISHED)
    edges.second.detached._retention = Retention(keep_s=0.0)
    await state_is(edges, job, JobState.EXPIRED)
    with pytest.raises(Gone) as caught:
        await attach(edges.first, job)
    assert (caught.value.status, caught.value.type, caught.value.code) == (410, "invalid_request_error", "gone")
