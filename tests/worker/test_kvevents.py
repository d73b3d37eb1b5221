"""KV events: a receiver that follows the protocol knows what the cache holds, whatever it missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random

import pytest

from schemas.identity import process_id
from schemas.kvevents import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Refusals, ask, listen
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix_cache import LruPrefixCache
from services.worker.kvevents import BATCH, KvEventFeed
from tests.waiting import PATIENCE_S, until

BLOCKS = 12
SUBJECTS = Subjects()
RUN = RunHolder(1)
_random = Random(3)


class Mirror:
    """What a router does: batches in order; the pages at the start and after a gap."""

    def __init__(self, bus: MemoryBus, worker: str) -> None:
        self.bus, self.worker = bus, worker
        self.batches: list[KvEvents] = []
        self.known: set[bytes] = set()
        self.at = 0

    async def start(self) -> None:
        await listen(self.bus, SUBJECTS.kv_events(self.worker), KvEvents, self.take, refusals=Refusals())

    def take(self, batch: KvEvents, _: Msg) -> None:
        self.batches.append(batch)

    async def page(self, number: int) -> KvSnapshot:
        request = KvSnapshotRequest(page=number)
        return await ask(self.bus, SUBJECTS.kv_snapshot(self.worker), request, KvSnapshot, timeout=PATIENCE_S)

    def build(self, pages: list[KvSnapshot]) -> None:
        assert [page.page for page in pages] == list(range(pages[0].pages))
        self.known = {name for page in pages for name in page.hashes}
        self.at = min(page.at for page in pages)

    def follow(self) -> bool:
        """Apply what came; False when a number is missing."""
        for batch in self.batches:
            if batch.first <= self.at:
                continue
            if batch.first != self.at + 1:
                return False
            self.at = batch.first
            self.known = (self.known | set(batch.stored)) - set(batch.removed)
        self.batches.clear()
        return True


class Bench:
    def __init__(self) -> None:
        broker = MemoryBroker()
        self.bus, router = (MemoryBus(broker, process_id(name, time.time(), _random)) for name in ("d1", "r1"))
        self.cache = LruPrefixCache()
        self.pool = BlockPool(BLOCKS, prefix=self.cache)
        self.feed = KvEventFeed(self.bus, SUBJECTS, self.pool, page=5)
        self.mirror = Mirror(router, self.bus.process)

    @property
    def held(self) -> set[bytes]:
        return set(self.cache.identities(range(BLOCKS)))

    def store(self, *names: bytes) -> None:
        """A run computes blocks of these identities and ends."""
        self.pool.seal(RUN, self.pool.allocate(RUN, len(names)), names)
        self.pool.release(RUN)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.feed.listen(Refusals())
    await made.mirror.start()
    yield made
    made.pool.check_integrity()


def key(name: int) -> bytes:
    return name.to_bytes(16, "big")


async def test_changes_are_said_in_numbered_batches(bench: Bench) -> None:
    bench.store(key(1), key(2))
    bench.feed.say()
    bench.pool.allocate(RUN, BLOCKS)
    bench.feed.say()
    await until(lambda: len(bench.mirror.batches) == 2)
    first, second = bench.mirror.batches
    assert (first.process, first.first, first.stored, first.removed) == (bench.bus.process, 1, (key(1), key(2)), ())
    assert (second.first, second.stored, set(second.removed)) == (2, (), {key(1), key(2)})


async def test_a_change_is_heard_without_asking_and_silence_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.kvevents.IDLE_S", 0.05)
    running = asyncio.create_task(bench.feed.run())
    bench.store(key(1))
    bench.store(key(2))
    await until(lambda: len(bench.mirror.batches) >= 3)
    assert bench.mirror.batches[0].stored == (key(1), key(2)), "one message for what happened together"
    assert all(not batch.stored and not batch.removed for batch in bench.mirror.batches[1:])
    assert [batch.first for batch in bench.mirror.batches] == list(range(1, len(bench.mirror.batches) + 1))
    running.cancel()


async def test_a_message_is_bounded() -> None:
    broker = MemoryBroker()
    bus, router = (MemoryBus(broker, process_id(name, time.time(), _random)) for name in ("d1", "r1"))
    cache = LruPrefixCache()
    feed = KvEventFeed(bus, SUBJECTS, BlockPool(1, prefix=cache))
    mirror = Mirror(router, bus.process)
    await mirror.start()
    names = [key(number) for number in range(2 * BATCH + 1)]
    cache.insert(names, range(len(names)))
    feed.say()
    await until(lambda: len(mirror.batches) == 3)
    assert [len(batch.stored) for batch in mirror.batches] == [BATCH, BATCH, 1]
    assert mirror.follow()
    assert mirror.known == set(names)


async def test_a_snapshot_says_what_it_contains(bench: Bench) -> None:
    bench.store(*map(key, range(1, 8)))
    pages = [await bench.mirror.page(number) for number in range(3)]
    assert [(page.page, page.pages, page.at) for page in pages[:1]] == [(0, 3, 1)]
    bench.mirror.build(pages)
    assert bench.mirror.known == bench.held == set(map(key, range(1, 8)))
    for outside in (-1, 3):
        assert (await bench.mirror.page(outside)).hashes == ()


async def test_what_moves_between_two_pages_is_not_lost(bench: Bench) -> None:
    """Evicted from a page that was not asked for yet and stored again on one that was, all before the next batch."""
    bench.store(*map(key, range(BLOCKS)))
    pages = [await bench.mirror.page(0)]
    bench.pool.allocate(RUN, BLOCKS)
    bench.pool.release(RUN)
    bench.store(*map(key, reversed(range(BLOCKS))))
    pages += [await bench.mirror.page(number) for number in (1, 2)]
    bench.mirror.build(pages)
    bench.feed.say()
    assert bench.mirror.follow()
    assert bench.mirror.known == bench.held


async def test_a_receiver_that_missed_a_batch_heals(bench: Bench) -> None:
    bench.store(key(1))
    bench.feed.say()
    await until(lambda: bench.mirror.batches)
    bench.mirror.batches.clear()  # lost
    bench.store(key(2))
    bench.feed.say()
    await until(lambda: bench.mirror.batches)
    assert not bench.mirror.follow()
    bench.mirror.build([await bench.mirror.page(number) for number in range(3)])
    assert bench.mirror.follow()
    assert bench.mirror.known == bench.held


async def test_changes_wait_while_the_bus_is_down(bench: Bench) -> None:
    bench.bus.disconnect()
    bench.store(key(1))
    bench.feed.say()
    bench.bus.reconnect()
    bench.store(key(2))
    bench.feed.say()
    await until(lambda: bench.mirror.batches)
    assert bench.mirror.follow(), "no number is missing"
    assert bench.mirror.known == bench.held


async def test_random_changes_batches_losses_and_snapshots(bench: Bench) -> None:
    random, mirror = Random(5), bench.mirror
    healed = 0
    for _ in range(300):
        names = [key(random.randrange(20)) for _ in range(random.randint(1, 4))]
        bench.store(*dict.fromkeys(names))
        if random.random() < 0.4:
            bench.feed.say()
        await mirror.bus.flush(PATIENCE_S)
        if random.random() < 0.1 and mirror.batches:
            del mirror.batches[random.randrange(len(mirror.batches))]
        if not mirror.follow():
            pages = []
            for number in range(3):
                pages.append(await mirror.page(number))
                bench.store(key(random.randrange(20)))
            mirror.build(pages)
            healed += 1
        assert mirror.follow()
    bench.feed.say()
    await mirror.bus.flush(PATIENCE_S)
    assert mirror.follow()
    assert mirror.known == bench.held
    assert healed > 3
