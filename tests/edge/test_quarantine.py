"""Requests that killed their workers: refused by content, by every edge, for ten minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from schemas.codec import encode_json
from schemas.errors import BusUnavailable, NotFound, OwnersDied, Quarantined
from schemas.job import pack_ids
from schemas.state import Cause
from schemas.subjects import QUARANTINE_BUCKET
from services.bus.jetstream import JetStream
from services.bus.kv_registry import KvRegistry
from services.bus.nats_bus import connect
from services.clock import ManualClock, SystemClock
from services.edge.quarantine import TTL_S, Quarantine
from services.edge.quarantine_bucket import Held, QuarantineBucket
from tests.edge.cluster import Cluster, draft, process
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S, until


def test_what_counts_is_the_tenants_prompt() -> None:
    quarantine, asked = Quarantine(ManualClock(), b"secret"), draft()
    quarantine.add(asked)
    assert replace(asked, n=2) in quarantine
    assert replace(asked, prompt=pack_ids([9, 9])) not in quarantine
    assert replace(asked, salt=b"another tenant") not in quarantine
    assert quarantine.key(asked) != Quarantine(ManualClock(), b"another secret").key(asked)


def test_it_ends_after_ten_minutes_or_when_lifted() -> None:
    clock, asked = ManualClock(), draft()
    quarantine = Quarantine(clock)
    quarantine.add(asked)
    clock.advance(TTL_S - 1)
    assert asked in quarantine
    clock.advance(2)
    assert asked not in quarantine
    quarantine.hold(quarantine.key(asked), 10 * TTL_S)
    assert asked in quarantine
    quarantine.lift(quarantine.key(asked))
    assert asked not in quarantine


async def test_after_a_third_death_the_same_request_is_refused(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(attempt) for attempt in (1, 2, 3)]
    handle = cluster.edge.start(draft())
    for attempt in (1, 2, 3):
        job = await cluster.submitted(attempt)
        cluster.own(process(f"d{attempt}"), job, attempt, hop=2)
        await until(lambda: handle._job.hop)
        cluster.die(process(f"d{attempt}"), Cause.KILLED)
        await until(lambda attempt=attempt: handle._job.deaths == attempt)
    with pytest.raises(OwnersDied):
        await handle.next(PATIENCE_S)
    with pytest.raises(Quarantined):
        cluster.edge.start(draft())


@asynccontextmanager
async def edge(server: NatsServer, name: str) -> AsyncIterator[Quarantine]:
    async with an_edge(server, name) as (quarantine, _):
        yield quarantine


@asynccontextmanager
async def an_edge(
    server: NatsServer, name: str, timeout: float = PATIENCE_S
) -> AsyncIterator[tuple[Quarantine, QuarantineBucket]]:
    """What one edge remembers, and what it shares. `timeout`: of JetStream; on a slow machine it may take long."""
    clock = SystemClock()
    bus = await connect(server.url, process(name), "edge", timeout=PATIENCE_S)
    quarantine = Quarantine(clock, b"secret")
    registry = KvRegistry(JetStream(bus, timeout=timeout), QUARANTINE_BUCKET, ttl_s=TTL_S)
    bucket = QuarantineBucket(quarantine, registry, bus, clock)
    await bucket.open()
    running = asyncio.create_task(bucket.run())
    try:
        yield quarantine, bucket
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await bus.close()


async def test_edges_hear_of_it_also_those_that_start_later(own_nats_server: NatsServer) -> None:
    asked = draft()
    async with edge(own_nats_server, "e1") as first, edge(own_nats_server, "e2") as second:
        first.add(asked)
        await until(lambda: asked in second)
        async with edge(own_nats_server, "e3") as third:
            await until(lambda: asked in third)


async def test_an_entry_that_is_none_hides_no_other(own_nats_server: NatsServer) -> None:
    asked = draft()
    async with edge(own_nats_server, "e1") as first:
        first.add(asked)
        bus = await connect(own_nats_server.url, process("operator"), "operator", timeout=PATIENCE_S)
        registry = KvRegistry(JetStream(bus, timeout=PATIENCE_S), QUARANTINE_BUCKET)
        async with asyncio.timeout(PATIENCE_S):
            while not await registry.entries():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await registry.put("0", {"until": "soon"})
        async with edge(own_nats_server, "e2") as second:
            await until(lambda: asked in second)
            second.add(other := replace(draft(), prompt=pack_ids([9])))
            await until(lambda: other in first)
        await bus.close()


async def test_an_operator_lifts_it(own_nats_server: NatsServer) -> None:
    asked = draft()
    async with edge(own_nats_server, "e1") as first:
        first.add(asked)
        bus = await connect(own_nats_server.url, process("operator"), "operator", timeout=PATIENCE_S)
        registry = KvRegistry(JetStream(bus, timeout=PATIENCE_S), QUARANTINE_BUCKET)
        key = first.key(asked)
        async with asyncio.timeout(PATIENCE_S):
            while list(await registry.entries()) != [key]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await registry.remove(key)
        await until(lambda: asked not in first)
        assert await registry.entries() == {}
        await bus.close()


async def test_an_operator_lifts_it_at_any_edge(own_nats_server: NatsServer) -> None:
    first_asked, other = draft(), replace(draft(), prompt=pack_ids([9]))
    async with an_edge(own_nats_server, "e1") as (first, _), an_edge(own_nats_server, "e2") as (second, bucket):
        first.add(first_asked)
        second.add(other)
        await until(lambda: len(first.held()) == len(second.held()) == 2)
        key = first.key(first_asked)
        assert set(bucket.held()) == {key, second.key(other)}
        assert all(TTL_S - 60 < left <= TTL_S for left in bucket.held().values())
        with pytest.raises(NotFound):
            await bucket.clear("nobody")
        assert await bucket.clear(key) == [key]
        assert first_asked not in second
        await until(lambda: first_asked not in first)
        assert other in first
        assert await bucket.clear("all") == [second.key(other)]
        await until(lambda: not first.held())
        async with edge(own_nats_server, "e3") as later:
            await until(lambda: later.held() == {})
            assert first_asked not in later


async def test_it_is_not_lifted_while_the_others_could_not_hear_of_it(own_nats_server: NatsServer) -> None:
    asked = draft()
    async with an_edge(own_nats_server, "e1", timeout=1.0) as (quarantine, bucket):
        quarantine.add(asked)
        own_nats_server.kill()
        with pytest.raises(BusUnavailable):
            await bucket.clear("all")
        assert asked in quarantine


class SlowRegistry:
    """A bucket with one entry. Reading all of it, and writing, waits for `go`; what was written is there all the same."""

    def __init__(self, key: str, value: bytes) -> None:
        self.go = asyncio.Event()
        self.reading = asyncio.Event()
        self.put_at: list[str] = []
        self.watcher: Callable[[str, bytes | None], None] = lambda key, value: None
        self._found = {key: value}

    async def watch(self, changed: Callable[[str, bytes | None], None]) -> None:
        self.watcher = changed

    async def ensure(self) -> None:
        pass

    async def entries(self) -> dict[str, bytes]:
        self.reading.set()
        await self.go.wait()
        return self._found

    async def put(self, key: str, value: object) -> None:
        self.put_at.append(key)
        if len(self.put_at) == 1:
            raise BusUnavailable("no answer in time")


async def test_what_was_lifted_elsewhere_does_not_come_back() -> None:
    """Neither from a reading that began before, nor by a write whose answer was too late."""
    quarantine, clock, bus = Quarantine(SystemClock(), b"secret"), SystemClock(), Cluster().edge_bus
    key = quarantine.key(asked := draft())
    registry = SlowRegistry(key, encode_json(Held(edge=bus.process, until=clock.wall() + TTL_S)))
    bucket = QuarantineBucket(quarantine, registry, bus, clock)  # type: ignore[arg-type]
    await bucket.open()
    running = asyncio.create_task(bucket.run())
    await registry.reading.wait()
    registry.watcher(key, None)
    registry.go.set()
    quarantine.add(other := replace(draft(), prompt=pack_ids([9])))
    await until(lambda: registry.put_at)
    assert asked not in quarantine
    registry.watcher(quarantine.key(other), None)
    quarantine.add(last := replace(draft(), prompt=pack_ids([8])))
    await until(lambda: quarantine.key(last) in registry.put_at)
    assert registry.put_at.count(quarantine.key(other)) == 1
    assert other not in quarantine
    running.cancel()
