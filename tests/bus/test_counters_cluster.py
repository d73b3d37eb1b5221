"""Limits of a minute while the server that leads their counters dies: fewer may be let in, never more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from schemas.errors import BusUnavailable
from schemas.subjects import COUNTERS_STREAM, Subjects
from services.bus.counters import Count, Counters
from services.bus.jetstream import JetStream
from services.bus.nats_bus import connect
from services.clock import SystemClock
from services.edge.gate.allotment import Allotment, Verdict
from tests.bus.test_cluster import TIMEOUT_S, eventually, leader
from tests.nats_fixture import NatsCluster
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LIMIT, LARGEST = 4000, 40


class Edge:
    """Asks for this and that until nothing is left."""

    def __init__(self, js: JetStream, seed: int) -> None:
        self.js = js
        self.counters = Counters(js, Subjects())
        self.granted = self.unknown = 0
        self._random = Random(seed)
        self._allotment = Allotment(self._add, SystemClock(), LIMIT, window_s=1e9)

    async def _add(self, window: int, amount: int) -> Count:
        return await self.counters.add("tokens", "key-a", window, amount)

    async def spend(self, spent: asyncio.Event) -> None:
        while not spent.is_set():
            amount = self._random.randint(1, LARGEST)
            match await self._allotment.take(amount):
                case Verdict.GRANTED:
                    self.granted += amount
                case Verdict.UNKNOWN:
                    self.unknown += 1
                case Verdict.SPENT if amount == 1:
                    spent.set()
            await asyncio.sleep(0.01)


@pytest.fixture
async def edges(nats_cluster: NatsCluster) -> AsyncIterator[list[Edge]]:
    names = [f"e{number}-0000000000000" for number in range(3)]
    buses = [await connect(nats_cluster.url.split(","), name, "edge") for name in names]
    made = [Edge(JetStream(bus, timeout=TIMEOUT_S, replicas=3), seed) for seed, bus in enumerate(buses)]
    await eventually(made[0].counters.ensure)
    yield made
    for bus in buses:
        await bus.close()


async def another(js: JetStream, than: str) -> None:
    """Raises `BusUnavailable` while nobody else leads."""
    if await leader(js, COUNTERS_STREAM) == than:
        raise BusUnavailable("it is not known yet that it is dead")


async def test_its_leader_dies_again_and_again(nats_cluster: NatsCluster, edges: list[Edge]) -> None:
    spent = asyncio.Event()
    spending = [asyncio.create_task(edge.spend(spent)) for edge in edges]
    for share in (0.1, 0.3):
        await until(lambda share=share: sum(edge.granted for edge in edges) > share * LIMIT, timeout=60)  # type: ignore[misc]
        name = await eventually(lambda: leader(edges[0].js, COUNTERS_STREAM))
        nats_cluster.nodes[name].kill()
        await eventually(lambda name=name: another(edges[0].js, name))  # type: ignore[misc]
        nats_cluster.start()
    async with asyncio.timeout(90):
        await asyncio.gather(*spending)
    granted = sum(edge.granted for edge in edges)
    print(f"\ngranted: {granted} of {LIMIT}; not told in time: {sum(edge.unknown for edge in edges)}")
    assert 0.4 * LIMIT <= granted <= LIMIT
