"""How a job gets to a worker, and how it goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.codec import decode, encode
from schemas.errors import (
    ContextLengthExceeded,
    InternalError,
    ModelChanged,
    ModelLoading,
    Overloaded,
    PayloadTooLarge,
    QueueExpired,
    Unavailable,
)
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import NO_WORKER, Queue, Refused
from schemas.reply import FinishReason
from schemas.state import Cause
from services.bus.memory_queue import MemoryWorkQueue
from tests.edge.cluster import DECODE, EDGE, MODEL, PREFILL, ROUTER, Cluster, collect, draft, process
from tests.waiting import PATIENCE_S, until


async def test_a_silent_router_is_asked_by_name_with_the_attempt_raised(cluster: Cluster) -> None:
    cluster.answers = [None, cluster.accept(2)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(2)
    assert [(subject, job.attempt) for subject, job in cluster.jobs] == [
        (f"hr.submit.{MODEL}", 1),
        (f"hr.router.{ROUTER}.submit", 2),
    ]
    assert not job.resume
    cluster.tokens(DECODE, job, 2, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_worker_that_is_gone_is_not_waited_for_where_another_model_answers(cluster: Cluster) -> None:
    for reason, refused in ((NO_WORKER, True), ("others_wait", False)):
        for elsewhere in (True, False):
            cluster.answers = [Queue(router=ROUTER, reason=reason)]
            handle = cluster.edge.start(replace(draft(), elsewhere=elsewhere))
            if refused and elsewhere:
                with pytest.raises(ModelLoading):
                    await handle.admitted()
            else:
                await handle.admitted()
                handle.cancel()


async def test_once_it_was_taken_nobody_else_answers_so_a_worker_is_waited_for(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), Queue(router=ROUTER, reason=NO_WORKER)]
    handle = cluster.edge.start(replace(draft(), elsewhere=True))
    await handle.admitted()
    cluster.die(PREFILL)
    await cluster.submitted(2)
    await until(lambda: handle._job.waits)
    assert await cluster.queue.pull("hr.jobs.>", "all") is not None
    handle.cancel()


async def test_routers_that_stay_silent_are_given_up(cluster: Cluster) -> None:
    handle = cluster.edge.start(draft())
    with pytest.raises(Unavailable):
        await handle.admitted()
    assert len(cluster.jobs) == 4
    await until(lambda: cluster.cancels)  # one of them may have heard


async def test_refused(cluster: Cluster) -> None:
    cluster.answers = [
        Refused(code="no_capacity", reason="full", retry_after=7.0),
        Refused(code="context_length_exceeded", reason="too long"),
    ]
    with pytest.raises(Unavailable) as busy:
        await cluster.edge.start(draft()).admitted()
    assert busy.value.retry_after == 7.0
    with pytest.raises(ContextLengthExceeded):
        await cluster.edge.start(draft()).admitted()


async def test_a_message_larger_than_the_bus_takes(cluster: Cluster) -> None:
    cluster.broker.max_payload = 64
    with pytest.raises(PayloadTooLarge):
        await cluster.edge.start(draft()).admitted()
    cluster.broker.max_payload = 2**20


async def test_queued(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    item = await cluster.queue.pull("hr.jobs.>", "all")
    assert item is not None
    job = decode(item.data, Job)
    assert item.subject == f"hr.jobs.{MODEL}.paid.3.{job.job}"
    headers = dict(item.headers)
    assert float(headers.pop("deadline")) == pytest.approx(job.deadlines.stamp + draft().limits.queue_s, abs=0.01)
    assert headers == {"tier": "paid", "lane": "3", "attempt": "1", "edge": EDGE}
    await item.ack()
    cluster.own(PREFILL, job, 1)
    cluster.tokens(PREFILL, job, 1, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_queue_deadline(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft(queue_s=0.3))
    await handle.admitted()
    with pytest.raises(QueueExpired):
        await handle.next(PATIENCE_S)
    await until(lambda: cluster.cancels)
    await until(lambda: len(cluster.edge) == 0)


async def test_the_queue_deadline_does_not_touch_a_job_that_left_the_queue(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft(queue_s=0.3))
    job = await cluster.submitted(1)
    await handle.admitted()
    cluster.own(PREFILL, job, 1)
    assert await handle.next(0.5) == []
    cluster.tokens(PREFILL, job, 1, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_full_queue_is_503_with_the_real_drain_rate(cluster: Cluster) -> None:
    full = MemoryWorkQueue(max_jobs=0)
    cluster.queue.put = full.put  # type: ignore[method-assign]
    cluster.report(waiting={"paid": 30, "free": 10}, drain_rate=3.0)
    await until(lambda: cluster.edge.models.waiting(MODEL) == 40)
    cluster.answers = [Queue(router=ROUTER)]
    with pytest.raises(Overloaded) as caught:
        await cluster.edge.start(draft()).admitted()
    assert caught.value.retry_after == 14.0


async def test_retry_goes_on_with_the_tokens_so_far(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), Queue(router=ROUTER), Refused(code="no_capacity", reason=""), cluster.accept(2)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 1)
    cluster.tokens(DECODE, job, 1, 0, [5, 6])
    cluster.event(DECODE, job, 1, 2, State.RETRY, reason="preempted")
    again = await cluster.submitted(4)  # a resume waits for credit in the edge, never in the queue
    assert await cluster.queue.waiting("hr.jobs.>") == {}
    assert (again.attempt, again.resume, again.weights, again.deaths) == (4, True, "w", 0)
    assert again.choices[0].generated == (5, 6)
    assert again.sampling == job.sampling
    assert again.deadlines.queue is None
    assert again.deadlines.first_token is None
    cluster.tokens(DECODE, again, 2, 2, [7], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6, 7], FinishReason.STOP)


async def test_a_killed_owner_is_resumed_at_once(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), cluster.accept(2)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 1)
    cluster.tokens(DECODE, job, 1, 0, [5])
    cluster.die(PREFILL)  # no longer the owner
    cluster.die(DECODE)
    again = await cluster.submitted(2)
    assert (again.deaths, again.resume, again.choices[0].generated) == (1, True, (5,))
    cluster.tokens(process("d2"), again, 2, 1, [6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)
    assert len(cluster.jobs) == 2


async def test_who_owned_it_and_died_before_that_was_heard_counts_as_dead(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), cluster.accept(2)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 1)
    cluster.die(DECODE)
    cluster.own(DECODE, job, 1, hop=2, state=State.HANDING_OFF)
    again = await cluster.submitted(2)
    assert (again.deaths, again.resume) == (1, True)
    cluster.tokens(process("d2"), again, 2, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_clean_leave_is_no_death(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    cluster.die(DECODE, Cause.LEFT)
    cluster.tokens(DECODE, job, 1, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_third_death_is_500(cluster: Cluster) -> None:
    workers = [process(f"d{n}") for n in range(3)]
    cluster.answers = [cluster.accept(n + 1) for n in range(3)]
    handle = cluster.edge.start(draft())
    for count, worker in enumerate(workers):
        job = await cluster.submitted(count + 1)
        assert job.deaths == count
        cluster.own(worker, job, count + 1, hop=2, state=State.PREFILLING)
        await until(lambda: [active for active in cluster.edge._jobs.values() if active.hop == 2])
        cluster.die(worker)
    with pytest.raises(InternalError):
        await collect(handle)
    assert len(cluster.jobs) == 3
    assert len(cluster.edge) == 0


async def test_a_worker_that_accepted_and_died_before_it_owned_is_no_death_of_an_owner(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), cluster.accept(2, prefill=process("p2"))]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    cluster.die(PREFILL)
    again = await cluster.submitted(2)
    assert (again.deaths, again.resume) == (0, False)
    handle.cancel()


async def test_of_a_resumed_job_the_death_of_who_accepted_it_counts(cluster: Cluster) -> None:
    workers = [process(f"p{number}") for number in range(3)]
    cluster.answers = [cluster.accept(number + 1, prefill=worker) for number, worker in enumerate(workers)]
    handle = cluster.edge.start(draft())
    first = await cluster.submitted(1)
    cluster.own(workers[0], first, 1)
    await until(lambda: handle._job.hop)
    for number, worker in enumerate(workers):
        await until(lambda worker=worker: handle._job.in_charge == worker)
        cluster.die(worker)
        await until(lambda number=number: handle._job.deaths == number + 1)
    with pytest.raises(InternalError):
        await collect(handle)


async def test_a_worker_that_accepted_and_stays_silent(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), cluster.accept(2)]
    handle = cluster.edge.start(draft())
    again = await cluster.submitted(2)
    assert (again.attempt, again.resume) == (2, False)
    await until(lambda: cluster.cancelled(PREFILL, 1))
    cluster.tokens(PREFILL, again, 2, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_a_resume_whose_weights_are_gone(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(1), Refused(code="model_changed", reason="no worker has these weights")]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 1, hop=2, state=State.DECODING)
    cluster.tokens(DECODE, job, 1, 0, [5])
    cluster.event(DECODE, job, 1, 2, State.RETRY, reason="draining")
    with pytest.raises(ModelChanged):
        await collect(handle)


async def test_a_router_gives_an_attempt_up(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    await handle.admitted()
    cluster.event(ROUTER, job, 5, 0, State.FAILED, error_code="model_loading")
    with pytest.raises(Unavailable) as caught:
        await handle.next(PATIENCE_S)
    assert caught.value.code == "model_loading"


async def test_a_submit_that_was_delivered_twice_is_owned_whatever_the_second_router_says(cluster: Cluster) -> None:
    cluster.answers = [None]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 7)
    await until(lambda: handle._job.owned)
    for answer in (Queue(router=ROUTER), Refused(code="no_capacity", reason="full")):
        cluster.bus.publish(cluster.inboxes[0], encode(answer))
    cluster.tokens(DECODE, job, 7, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert await cluster.queue.waiting(cluster.subjects.jobs()) == {}


async def test_the_last_token_of_an_attempt_that_was_given_up_ends_the_job(cluster: Cluster) -> None:
    cluster.then = cluster.accept(7)
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, 7, hop=2, state=State.DECODING)
    cluster.event(DECODE, job, 7, 2, State.RETRY)
    cluster.tokens(DECODE, job, 7, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert len(cluster.jobs) == 1
