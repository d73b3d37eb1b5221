"""Counters on a real server: additions answered with the value, over several processes, also after the stream was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.errors import BusUnavailable
from schemas.subjects import Subjects
from services.bus.counters import Count, Counters
from services.bus.jetstream import JetStream
from services.bus.nats_bus import NatsBus, connect
from services.clock import SystemClock
from services.edge.gate.allotment import SLICES, Allotment, Verdict
from tests.nats_fixture import NatsServer, lose_data
from tests.waiting import PATIENCE_S

EDGES = ("e1-0000000000000", "e2-0000000000000", "e3-0000000000000")


@pytest.fixture
async def buses(own_nats_server: NatsServer) -> AsyncIterator[list[NatsBus]]:
    made = [await connect([own_nats_server.url], edge, "edge") for edge in EDGES]
    yield made
    for bus in made:
        await bus.close()


@pytest.fixture
def edges(buses: list[NatsBus]) -> list[Counters]:
    return [Counters(JetStream(bus, timeout=PATIENCE_S), Subjects()) for bus in buses]


async def test_additions_are_answered_with_the_value(edges: list[Counters]) -> None:
    assert [await edge.add("requests", "key-a", 1, amount) for edge, amount in zip(edges, (5, 7, -2), strict=True)] == [
        Count(5),
        Count(12),
        Count(10),
    ]
    assert await edges[0].add("requests", "key-a", 2, 1) == Count(1)
    assert await edges[0].add("requests", "key-b", 1, 1) == Count(1)


async def test_the_stream_is_made_again_when_it_is_gone(edges: list[Counters], own_nats_server: NatsServer) -> None:
    """Who had used it knows that it is another one."""
    for _ in range(3):
        await edges[0].add("requests", "key-a", 1, 5)
    await lose_data(own_nats_server, [edge._js.bus for edge in edges])
    assert await edges[1].add("requests", "key-a", 1, 2) == Count(2)
    both = await asyncio.gather(*(edges[0].add("requests", name, 1, 1) for name in ("key-a", "key-b")))
    assert both == [Count(3, era=1), Count(1, era=1)]
    assert await edges[0].add("requests", "key-a", 1, 1) == Count(4, era=1)
    assert await edges[0].add("requests", "key-a", 2, 1) == Count(1), "of what came later nothing was lost"


async def test_a_server_that_is_gone_is_said_in_time(buses: list[NatsBus], own_nats_server: NatsServer) -> None:
    hasty = Counters(JetStream(buses[0], timeout=0.5), Subjects())
    own_nats_server.kill()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BusUnavailable):
            await hasty.add("requests", "key-a", 1, 1)


async def test_five_hundred_requests_at_a_limit_of_a_hundred_over_three_edges(edges: list[Counters]) -> None:
    """Never more, and no fewer than 100 less the stated slack: two slices an edge."""

    def allotment(edge: Counters) -> Allotment:
        async def add(window: int, amount: int) -> Count:
            return await edge.add("requests", "key-a", window, amount)

        return Allotment(add, SystemClock(), 100, window_s=1e9)

    allotments = [allotment(edge) for edge in edges]
    for edge in edges:
        await edge.ensure()
    verdicts = await asyncio.gather(*(allotments[number % 3].take(1, patience=PATIENCE_S) for number in range(500)))
    granted = verdicts.count(Verdict.GRANTED)
    assert 100 - len(edges) * 2 * (100 // SLICES) <= granted <= 100
