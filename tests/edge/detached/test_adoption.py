"""An edge that dies or leaves: its detached jobs go on at another one."""

from __future__ import annotations

import asyncio

import pytest

from schemas.lifecycle import State
from schemas.placement import Queue
from schemas.reply import FinishReason
from schemas.state import Cause
from tests.edge.cluster import DECODE, EDGE, ROUTER
from tests.edge.detached.rig import SECOND, TENANT, Owner, Pair, attach, begun, long_draft, read_all, written
from tests.waiting import PATIENCE_S, until


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
