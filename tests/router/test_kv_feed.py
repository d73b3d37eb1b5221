"""The feed against a real worker's feed, on a bus that loses what the test wants lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from schemas.kvevents import KvEvents
from services.bus.memory import Delivery, MemoryBroker, MemoryBus, soon
from services.bus.typed import Refusals, listen
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix_cache import LruPrefixCache
from services.router.kv_feed import KvFeed
from services.router.prefix_index import PrefixIndex
from services.router.tasks import Tasks
from services.worker.kvevents import KvEventFeed
from tests.router.fakes import SUBJECTS, a_process
from tests.waiting import until

BLOCKS = 12


def names(*numbers: int) -> list[bytes]:
    return [Random(number).randbytes(16) for number in numbers]


class Bench:
    """One worker's cache and its feed, one router's index."""

    def __init__(self, page: int = 4) -> None:
        self.broker = MemoryBroker()
        self.router = MemoryBus(self.broker, a_process("router"))
        self.worker = MemoryBus(self.broker, a_process("p1"))
        memory = memoryview(bytearray(BLOCKS * 64))
        self.pool = BlockPool(BLOCKS, block_bytes=64, memory=memory, prefix=LruPrefixCache())
        self.says = KvEventFeed(self.worker, SUBJECTS, self.pool, page=page)
        self.index = PrefixIndex()
        self.tasks = Tasks()
        self.feed = KvFeed(self.router, SUBJECTS, self.index, self.tasks.spawn)
        self.runs = 0

    async def start(self) -> Bench:
        await self.says.listen(Refusals())
        await self.hear()
        return self

    async def hear(self) -> None:
        await listen(self.router, SUBJECTS.kv_events_any(), KvEvents, self.feed.on_events, refusals=Refusals())

    def cache(self, chain: list[bytes]) -> None:
        """A run computes these blocks and ends."""
        self.runs += 1
        holder = RunHolder(self.runs)
        blocks = self.pool.allocate(holder, len(chain))
        self.pool.seal(holder, blocks, chain)
        self.pool.release(holder)

    def say(self) -> None:
        self.says.say()

    def held(self) -> set[bytes]:
        return set(self.pool.prefix.identities(range(BLOCKS)))

    def agrees(self) -> bool:
        known = {name for shard in self.index._shards for name, mask in shard.items() if mask & self.index._live}
        return known == self.held()

    def lose(self, lost: Callable[[Delivery], bool]) -> None:
        self.broker.deliver = lambda delivery: None if lost(delivery) else soon(delivery)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = await Bench().start()
    yield bench
    await bench.tasks.cancel()


def is_events(delivery: Delivery) -> bool:
    return delivery.msg.subject.startswith("hr.kvevents.") and not delivery.msg.subject.endswith(".snapshot")


async def test_batches_are_followed(bench: Bench) -> None:
    bench.cache(names(1, 2, 3))
    bench.say()
    await until(bench.agrees)
    assert bench.index.hits(names(1, 2, 3)) == {bench.worker.process: 3}
    for number in range(10, 30):
        bench.cache(names(number))
        bench.say()
    await until(bench.agrees)
    assert len(bench.tasks) == 0, "nothing was missed, so nothing was asked for"


async def test_a_router_that_comes_later_reads_a_snapshot(bench: Bench) -> None:
    late = KvFeed(MemoryBus(bench.broker, a_process("router2")), SUBJECTS, bench.index, bench.tasks.spawn)
    bench.lose(is_events)
    bench.cache(names(1, 2, 3, 4, 5, 6))
    bench.say()
    bench.broker.deliver = soon
    await listen(late._bus, SUBJECTS.kv_events_any(), KvEvents, late.on_events, refusals=Refusals())
    bench.say()
    await until(lambda: bench.agrees() and not bench.tasks._running)


async def test_a_gap_is_healed(bench: Bench) -> None:
    bench.cache(names(1, 2))
    bench.say()
    await until(bench.agrees)
    bench.lose(is_events)
    bench.cache(names(3, 4, 5))
    bench.say()
    bench.broker.deliver = soon
    bench.cache(names(6, 7))
    bench.say()
    await until(lambda: len(bench.held()) == 7 and bench.agrees())


async def test_batches_that_come_while_pages_are_read_are_not_lost(bench: Bench) -> None:
    bench.lose(is_events)
    bench.cache(names(1, 2, 3, 4, 5, 6, 7, 8))
    bench.say()
    number = 20

    def change(delivery: Delivery) -> None:
        nonlocal number
        if delivery.msg.subject.endswith(".snapshot") and number < 26:
            number += 1
            bench.cache(names(number))
        soon(delivery)

    bench.broker.deliver = change
    bench.say()
    await until(lambda: number > 22)
    bench.say()
    await until(bench.agrees)


async def test_a_page_that_does_not_come_is_asked_for_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.kv_feed.PAGE_S", 0.05)
    monkeypatch.setattr("services.router.kv_feed.AGAIN_S", 0.05)
    lost = 0

    def lose(delivery: Delivery) -> bool:
        nonlocal lost
        lost += delivery.msg.subject.endswith(".snapshot")
        return delivery.msg.subject.endswith(".snapshot") and lost < 3

    bench.lose(is_events)
    bench.cache(names(1, 2, 3))
    bench.say()
    bench.lose(lose)

    def spoke() -> bool:
        bench.say()  # as it does once a second
        return lost >= 3 and bench.agrees()

    await until(spoke)


async def test_a_removal_of_what_we_never_had_is_a_disagreement(bench: Bench) -> None:
    bench.cache(names(1, 2, 3))
    bench.say()
    await until(bench.agrees)
    bench.index.removed(bench.worker.process, names(1))
    assert not bench.agrees()
    for number in range(4, 17):  # evicts 1
        bench.cache(names(number))
    bench.say()
    await until(bench.agrees)


async def test_a_process_that_is_gone_is_asked_no_more(bench: Bench) -> None:
    bench.lose(lambda delivery: delivery.msg.subject.endswith(".snapshot") or is_events(delivery))
    bench.cache(names(1))
    bench.say()
    bench.lose(lambda delivery: delivery.msg.subject.endswith(".snapshot"))
    bench.say()
    await until(lambda: len(bench.tasks) == 1)
    bench.feed.forget(bench.worker.process)
    assert bench.feed.processes == set()
    await until(lambda: not len(bench.tasks))
