"""What an operator sees of an edge's jobs, and jobs that he ends: here, at a worker, at a router."""

from __future__ import annotations

import pytest

from schemas.errors import Cancelled, NotFound
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Queue
from schemas.reply import BY_OPERATOR, Event
from services.edge.jobs.handle import JobHandle
from tests.edge.cluster import DECODE, EDGE, PREFILL, ROUTER, Cluster, draft
from tests.waiting import PATIENCE_S, until


async def decoding(cluster: Cluster) -> tuple[JobHandle, Job]:
    """A job that a decode worker owns, as run 7."""
    cluster.answers.insert(0, cluster.accept(7))
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 7, hop=2, state=State.DECODING)
    await until(lambda: cluster.edge.held.jobs()[0].worker == DECODE)
    return handle, job


async def ended(cluster: Cluster, handle: JobHandle, job: Job) -> None:
    """Its client is told, its worker is, and once that confirms it nothing is left."""
    with pytest.raises(Cancelled):
        await handle.next(PATIENCE_S)
    await until(lambda: cluster.cancelled(DECODE, 7))
    cluster.event(DECODE, job, 7, 2, State.CANCELLED)
    await until(lambda: len(cluster.edge) == 0)
    assert len(cluster.jobs) == 1, "nothing is resumed"


async def test_what_is_shown_of_a_job(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    _, job = await decoding(cluster)
    second = cluster.edge.start(draft())
    await second.admitted()
    await until(lambda: cluster.edge.held.jobs()[0].state is State.DECODING)
    first, waiting = cluster.edge.held.jobs()
    assert (first.job, first.run, first.worker, first.edge) == (job.job, f"{7:016x}", DECODE, EDGE)
    assert (first.tier, first.lane, first.attempt) == ("paid", 3, 1)
    assert first.age_s is not None
    assert 0 <= first.age_s < 60
    assert (waiting.state, waiting.worker, waiting.run) == (State.QUEUED, "", "")


async def test_a_job_that_computes_is_ended_everywhere_and_its_client_told(cluster: Cluster) -> None:
    handle, job = await decoding(cluster)
    cluster.edge.held.cancel(job.job)
    assert cluster.edge.held.jobs()[0].state is State.CANCELLED
    await until(lambda: cluster.cancelled(DECODE, 7) >= 2)
    await ended(cluster, handle, job)


async def test_a_job_that_waits_is_taken_out_of_the_queue(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    cluster.edge.held.cancel(handle.id)
    with pytest.raises(Cancelled):
        await handle.next(PATIENCE_S)
    await until(lambda: cluster.cancels)
    assert cluster.cancels[0].job == handle.id
    await until(lambda: len(cluster.edge) == 0)


async def test_what_is_not_here_or_over_cannot_be_ended(cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        cluster.edge.held.cancel("0" * 32)
    cluster.acks = False
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    cluster.edge.held.cancel(handle.id)
    with pytest.raises(NotFound):
        cluster.edge.held.cancel(handle.id)
    cluster.acks = True


async def test_what_an_operator_ended_at_a_worker_is_not_resumed(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(7)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 7)
    cluster.event(PREFILL, job, 7, 1, State.CANCELLED, reason=BY_OPERATOR)
    with pytest.raises(Cancelled):
        await handle.next(PATIENCE_S)
    await until(lambda: len(cluster.edge) == 0)
    assert len(cluster.jobs) == 1, "nothing is resumed"


async def test_what_ended_at_prefill_while_decode_has_it_ends_there_too(cluster: Cluster) -> None:
    handle, job = await decoding(cluster)
    cluster.event(PREFILL, job, 7, 1, State.CANCELLED, reason=BY_OPERATOR)
    await ended(cluster, handle, job)


async def test_a_router_hands_an_operators_word_on(cluster: Cluster) -> None:
    handle, job = await decoding(cluster)
    word = Event(run=0, job=job.job, attempt=0, hop=0, state=State.CANCELLED, reason=BY_OPERATOR)
    cluster.say(ROUTER, events=[word])
    await ended(cluster, handle, job)
