"""Jobs in a queue that lost them, or seems to have."""

from __future__ import annotations

from schemas.placement import Queue
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.requeue import LOST_S
from tests.edge.cluster import MODEL, PREFILL, ROUTER, Cluster, draft
from tests.waiting import until


async def queued(cluster: Cluster) -> tuple[JobHandle, str]:
    """A job that waits, and its subject."""
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    await handle.admitted()
    await until(lambda: handle._job.queued_at < float("inf"))
    (subject,) = await cluster.queue.waiting("hr.jobs.>")
    return handle, subject


async def test_after_the_connection_was_lost_it_is_there_again(cluster: Cluster) -> None:
    _, subject = await queued(cluster)
    cluster.edge_bus.disconnect()
    cluster.queue.lose_everything()
    cluster.edge_bus.reconnect()
    await until(lambda: subject in cluster.queue)


async def test_a_queue_that_kept_it_takes_no_second_one(cluster: Cluster) -> None:
    handle, subject = await queued(cluster)
    item = await cluster.queue.pull(subject, "all")
    assert item is not None
    await item.ack()
    put = handle._job.queued_at
    cluster.edge_bus.disconnect()
    cluster.edge_bus.reconnect()
    await until(lambda: handle._job.queued_at > put)
    assert subject not in cluster.queue


async def test_when_routers_say_that_nothing_waits_it_was_lost(cluster: Cluster) -> None:
    handle, subject = await queued(cluster)
    cluster.report(waiting={"paid": 1})
    await until(lambda: cluster.edge.models.waiting(MODEL) == 1)
    cluster.queue.lose_everything()
    handle._job.queued_at -= LOST_S
    await cluster.edge._requeue.look()
    assert subject not in cluster.queue
    cluster.report(waiting={})
    await until(lambda: subject in cluster.queue)


async def test_what_somebody_owns_waits_no_more(cluster: Cluster) -> None:
    handle, subject = await queued(cluster)
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, 7)
    await until(lambda: handle._job.hop)
    cluster.queue.lose_everything()
    handle._job.queued_at -= LOST_S
    cluster.report(waiting={})
    await until(lambda: cluster.edge.models.waiting(MODEL) == 0)
    await cluster.edge._requeue.look()
    assert subject not in cluster.queue
