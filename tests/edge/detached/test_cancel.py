"""Detached jobs are ended from any edge, by their caller or an operator, also while they are adopted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.codec import encode
from schemas.errors import NotFound
from schemas.reply import Frames, by_operator
from services.edge.jobs.handle import JobCancelled
from services.edge.store.records import JobState
from tests.edge.cluster import ROUTER
from tests.edge.detached.rig import ADOPTING, SECOND, TENANT, Pair, attach, begun, pair, read_all, state_is
from tests.waiting import until


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
