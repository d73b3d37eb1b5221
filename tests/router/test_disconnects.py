"""Whose connection ended and did not come back; when it says nothing of anybody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from services.clock import LoopClock
from services.router.disconnects import BACK_S, Disconnects
from tests.simulation.loop import VirtualLoop


@dataclass
class Line:
    steady: float = float("inf")

    def steady_for(self) -> float:
        return self.steady


class Room:
    """Ten processes that a router hears, on a virtual clock."""

    def __init__(self) -> None:
        self.line = Line()
        self.gone: list[str] = []
        self.disconnects = Disconnects(self.line, LoopClock(asyncio.get_running_loop()), self.gone.append)
        for number in range(10):
            self.disconnects.heard(f"p{number}")


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


def test_who_does_not_come_back_is_gone(loop: VirtualLoop) -> None:
    async def story() -> None:
        room = Room()
        room.disconnects.ended("p1")
        await asyncio.sleep(BACK_S - 0.01)
        assert not room.gone
        await asyncio.sleep(0.02)
        assert room.gone == ["p1"]
        assert room.disconnects.away("p1")
        room.disconnects.heard("p1")
        assert not room.disconnects.away("p1")

    loop.run_until_complete(story())


def test_who_is_heard_again_was_never_away(loop: VirtualLoop) -> None:
    async def story() -> None:
        room = Room()
        room.disconnects.ended("p1")
        await asyncio.sleep(0.1)
        room.disconnects.heard("p1")
        await asyncio.sleep(0.1)
        room.disconnects.ended("p1")
        await asyncio.sleep(BACK_S - 0.05)
        assert not room.gone, "the time counts from the last end"
        await asyncio.sleep(0.1)
        assert room.gone == ["p1"]

    loop.run_until_complete(story())


@pytest.mark.parametrize(("together", "gone"), [(1, 1), (3, 3), (4, 0), (10, 0)])
def test_a_third_of_all_at_once_is_the_bus(loop: VirtualLoop, together: int, gone: int) -> None:
    async def story() -> None:
        room = Room()
        for number in range(together):
            room.disconnects.ended(f"p{number}")
        await asyncio.sleep(BACK_S + 0.01)
        assert len(room.gone) == gone

    loop.run_until_complete(story())


def test_nothing_is_said_of_strangers_of_the_dead_or_just_after_our_own_reconnect(loop: VirtualLoop) -> None:
    async def story() -> None:
        room = Room()
        room.disconnects.ended("never-heard")
        room.disconnects.ended("p1")
        room.disconnects.died("p1")
        await asyncio.sleep(BACK_S + 0.01)
        room.line.steady = 2.9
        room.disconnects.ended("p2")
        await asyncio.sleep(BACK_S + 0.01)
        assert not room.gone

    loop.run_until_complete(story())
