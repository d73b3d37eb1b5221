"""A cancel at each point before anybody owns the job."""

from __future__ import annotations

import asyncio

from schemas.codec import encode
from schemas.control import CancelAck
from schemas.placement import Accepted, Refused
from schemas.state import Role
from services.bus.memory import Delivery, soon
from services.bus.typed import Refusals, listen
from services.router.cancel import MOST_PURGES
from tests.router.fakes import MODEL, SUBJECTS, a_job
from tests.router.harness import CountedQueue, House, a_cancel
from tests.waiting import until


async def test_every_router_answers_and_one_purges(house_of_two: House) -> None:
    job = a_job()
    await house_of_two.put(job)
    acks = await house_of_two.cancel(job)
    assert {ack.router for ack in acks} == {router.status().router for router in house_of_two.routers}
    assert sorted(ack.purged for ack in acks) == [False, True]
    assert not await house_of_two.queued()


async def test_cancelled_while_queued_it_is_never_placed(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    job, other = a_job(), a_job()
    await house.put(job, other)
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {"paid": 2})
    await house.cancel(job)
    both.free()
    await until(lambda: both.placed)
    assert [placement.job for placement in both.placed] == [other]


async def test_cancelled_before_it_reaches_the_queue(house: House) -> None:
    """The edge's publish into the queue and its cancel overtake one another."""
    [both] = await house.workers(Role.BOTH)
    job, other = a_job(), a_job()
    await house.cancel(job)
    await house.put(job, other)
    await until(lambda: both.placed)
    assert [placement.job for placement in both.placed] == [other]


async def test_cancelled_after_the_pull(house: House) -> None:
    """Reserved on decode, not yet submitted to prefill: the reservation goes, the job does not come back."""
    prefill, decode = await house.workers(Role.PREFILL, Role.DECODE)
    job = a_job()

    def deliver(delivery: Delivery) -> None:
        soon(delivery)
        if delivery.msg.subject == SUBJECTS.decode_lease(decode.process) and not decode.heard:
            house.edge.publish(SUBJECTS.cancel(), encode(a_cancel(job)))

    house.broker.deliver = deliver
    await house.put(job)
    await until(lambda: "lease release" in decode.heard)
    assert not decode.reserved
    assert not prefill.placed
    assert not await house.queued()
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {})


async def test_cancelled_before_its_submit(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    job = a_job()
    await house.cancel(job)
    assert isinstance(await house.submit(job), Refused)
    assert not both.heard
    assert isinstance(await house.submit(a_job()), Accepted)


class SlowQueue(CountedQueue):
    """A purge takes until `open`; counts how many are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.purging = self.most = self.purged = 0

    async def purge(self, subject: str) -> bool:
        self.purging += 1
        self.most = max(self.most, self.purging)
        await self.open.wait()
        self.purging -= 1
        self.purged += 1
        return await super().purge(subject)


async def test_a_storm_of_cancels_asks_the_queue_for_few_purges_at_a_time() -> None:
    """All are remembered at once; those that would wait for the queue are answered before it."""
    house, jobs = House(queue=(queue := SlowQueue())), [a_job() for _ in range(20 * MOST_PURGES)]
    await house.open()
    await house.router()
    await house.put(*jobs)
    acks: list[CancelAck] = []
    inbox = house.edge.new_inbox()
    await listen(house.edge, inbox, CancelAck, lambda ack, _: acks.append(ack), refusals=Refusals())
    for job in jobs:
        house.edge.publish(SUBJECTS.cancel(), encode(a_cancel(job)), reply=inbox)
    await until(lambda: len(acks) >= len(jobs) - MOST_PURGES)
    assert queue.most == MOST_PURGES
    queue.open.set()
    await until(lambda: queue.purged == len(acks) == len(jobs))
    assert queue.most == MOST_PURGES
    assert not await house.queued()
    await house.routers[0].drain()


async def test_answered_also_while_the_queue_is_down(house: House) -> None:
    house.queue.down = True
    job = a_job()
    for _ in range(2):
        [ack] = await house.cancel(job)
        assert (ack.job, ack.purged) == (job.job, False)
