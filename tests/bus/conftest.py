"""A pair of kinds of bus: `new_bus(name)` makes a connection of its own to one shared server or broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import pytest

from schemas.identity import process_id
from services.bus.interface import Bus
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.nats_bus import connect
from tests.nats_fixture import NatsServer

NewBus = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["nats", "memory"])
async def new_bus(request: pytest.FixtureRequest) -> AsyncIterator[NewBus]:
    """Both implementations; every test that takes this runs over each."""
    buses: list[Bus] = []
    random = Random()
    if request.param == "nats":
        server: NatsServer = request.getfixturevalue("nats_server")

        async def make(name: str) -> Bus:
            buses.append(await connect(server.url, process_id(name, 1.7e9, random), "test"))
            return buses[-1]

    else:
        broker = MemoryBroker()

        async def make(name: str) -> Bus:
            buses.append(MemoryBus(broker, process_id(name, 1.7e9, random)))
            return buses[-1]

    yield make
    await asyncio.gather(*(bus.close() for bus in buses))
