"""Counters that a real server lost, seen by an edge that has no question for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from schemas.errors import BusUnavailable
from schemas.subjects import Subjects
from services.bus.counters import Count, Counters
from services.bus.jetstream import JetStream
from services.bus.nats_bus import connect
from services.clock import ManualClock
from services.edge.gate.allotment import Allotment, Verdict
from services.edge.gate.losses import look
from tests.nats_fixture import NatsServer, lose_data
from tests.waiting import PATIENCE_S

LIMIT = 100


class Edge:
    """One allotment of a limit that all share. `asked`: how often its counters were."""

    def __init__(self, server: NatsServer, js: JetStream, clock: ManualClock) -> None:
        self.server = server
        self.js = js
        self.clock = clock
        self.asked = 0
        self.down = False
        self._counters = Counters(js, Subjects())

        async def count(window: int, amount: int) -> Count:
            return await self.add("requests", "key-a", window, amount)

        self.allotment = Allotment(count, clock, LIMIT)

    async def add(self, kind: str, owner: str, window: int, amount: int) -> Count:
        self.asked += 1
        if self.down:
            raise BusUnavailable("down")
        return await self._counters.add(kind, owner, window, amount)

    async def take(self, amount: int) -> Verdict:
        return await self.allotment.take(amount, PATIENCE_S)

    async def look(self) -> None:
        await look(self.add, [self.allotment], self.clock)

    async def counted(self) -> int:
        return (await self._counters.add("requests", "key-a", self.allotment.window, 0)).value


@pytest.fixture
async def edges(own_nats_server: NatsServer) -> AsyncIterator[list[Edge]]:
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        made = []
        for name in ("e1-0000000000000", "e2-0000000000000"):
            bus = await connect([own_nats_server.url], name, "edge")
            stack.push_async_callback(bus.close)
            made.append(Edge(own_nats_server, JetStream(bus, timeout=PATIENCE_S), clock))
        yield made


async def lose(edges: list[Edge]) -> None:
    await lose_data(edges[0].server, [edge.js.bus for edge in edges])


async def test_what_an_edge_took_that_asks_no_more_is_not_granted_again(edges: list[Edge]) -> None:
    one, other = edges
    assert await one.take(80) is Verdict.GRANTED
    assert await other.take(1) is Verdict.GRANTED
    for _ in range(5):  # as for the seconds before: an edge is no further behind the stream than its last look
        await other.look()
        await one.look()
    await lose(edges)
    assert await other.take(30) is Verdict.SPENT
    await one.look()
    one.clock.advance(1.1)
    assert await other.take(30) is Verdict.SPENT
    one.clock.advance(1.1)
    assert await other.take(10) is Verdict.GRANTED


async def test_it_is_put_back_once(edges: list[Edge]) -> None:
    """However often it looks, and whether a question or a look comes first."""
    one, other = edges
    assert await one.take(50) is Verdict.GRANTED
    before = await one.counted()
    for _ in range(2):
        await lose(edges)
        for _ in range(3):
            await one.look()
            assert await one.counted() == before
    await lose(edges)
    assert await one.take(20) is Verdict.SPENT
    for _ in range(2):
        await one.look()
        assert await one.counted() == before
    assert await other.take(LIMIT - before) is Verdict.GRANTED


async def test_a_look_that_fails_is_made_up_for(edges: list[Edge]) -> None:
    one, _ = edges
    assert await one.take(50) is Verdict.GRANTED
    before = await one.counted()
    await lose(edges)
    one.down = True
    await one.look()
    one.down = False
    await one.look()
    assert await one.counted() == before


async def test_who_took_nothing_of_this_minute_does_not_look(edges: list[Edge]) -> None:
    one, _ = edges
    await one.look()
    assert one.asked == 0
    assert await one.take(1) is Verdict.GRANTED
    one.clock.advance(61)
    asked = one.asked
    await one.look()
    assert one.asked == asked
