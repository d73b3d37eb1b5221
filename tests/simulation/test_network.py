"""Links that hold, cut and lose; weather."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from services.bus.memory import MemoryBus
from services.clock import LoopClock
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, State, Weather

SOON = 0.01


@dataclass
class Pair:
    loop: VirtualLoop
    network: Network = field(init=False)
    got: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(self.loop, Random(1))
        self.one, self.two = self._join("one"), self._join("two")

    def _join(self, name: str) -> MemoryBus:
        bus = MemoryBus(self.network.broker, name, clock=LoopClock(self.loop))
        self.network.join(Process(self.loop, name, name), bus)
        return bus

    async def say(self, numbers: range) -> list[int]:
        """What the other has heard a moment later."""
        for number in numbers:
            self.one.publish("a", bytes([number]))
        await asyncio.sleep(SOON)
        return self.got

    def tell(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            await self.two.subscribe("a", lambda msg: self.got.append(msg.data[0]))
            await story()

        self.loop.run_until_complete(whole())


@pytest.fixture
def pair() -> Iterator[Pair]:
    loop = VirtualLoop()
    yield Pair(loop)
    loop.close()


def test_one_connection_keeps_its_order(pair: Pair) -> None:
    async def story() -> None:
        assert await pair.say(range(50)) == list(range(50))

    pair.tell(story)


def test_a_held_link_delivers_late_and_in_order(pair: Pair) -> None:
    async def story() -> None:
        pair.network.cut("two", State.HELD)
        assert await pair.say(range(5)) == []
        pair.network.heal("two")
        assert await pair.say(range(5, 6)) == list(range(6))

    pair.tell(story)


@pytest.mark.parametrize("side", ["one", "two"])
def test_a_cut_link_loses(pair: Pair, side: str) -> None:
    async def story() -> None:
        pair.network.cut(side, State.CUT)
        assert await pair.say(range(5)) == []
        pair.network.heal(side)
        assert await pair.say(range(5, 6)) == [5]

    pair.tell(story)


def test_a_dropped_connection_takes_what_is_on_its_way_with_it(pair: Pair) -> None:
    async def story() -> None:
        pair.one.publish("a", bytes([1]))
        pair.network.drop("two")
        pair.network.restore("two")
        assert await pair.say(range(2, 3)) == [2]

    pair.tell(story)


def test_weather_loses_doubles_and_disorders(pair: Pair) -> None:
    async def story() -> None:
        pair.network.change(Weather(loss=0.3, double=0.3, disorder=0.3))
        got = await pair.say(range(100))
        assert set(got) < set(range(100))
        assert len(set(got)) < len(got)
        assert sorted(got) != got

    pair.tell(story)


def test_a_paused_receiver_hears_when_it_wakes(pair: Pair) -> None:
    async def story() -> None:
        process = pair.network.link("two").process
        process.pause()
        assert await pair.say(range(3)) == []
        process.resume()
        assert await pair.say(range(3, 4)) == [0, 1, 2, 3]

    pair.tell(story)
