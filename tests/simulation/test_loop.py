"""Virtual time, and processes that stop while others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from tests.simulation.loop import Process, Stuck, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def _tick(loop: VirtualLoop, ticks: list[float]) -> None:
    while True:
        ticks.append(loop.time())
        await asyncio.sleep(1.0)


def _run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(work)


def test_an_hour_passes_at_once_and_in_order(loop: VirtualLoop) -> None:
    began, seen = time.monotonic(), []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, loop.time()))

    async def both() -> None:
        await asyncio.gather(wait(3600.0), wait(1.5))

    _run(loop, both())
    assert seen == [(1.5, 1.5), (3600.0, 3600.0)]
    assert time.monotonic() - began < 60.0  # not an hour


def test_time_outs_are_virtual_too(loop: VirtualLoop) -> None:
    async def wait() -> None:
        async with asyncio.timeout(5.0):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        _run(loop, wait())
    assert loop.time() == 5.0


def test_a_paused_process_stands_still_and_catches_up(loop: VirtualLoop) -> None:
    ticks: list[float] = []

    async def story() -> None:
        process = Process(loop, "one", "one-1")
        process.spawn(_tick(loop, ticks), "tick")
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(3.0)
        assert ticks == [0.0, 1.0]
        process.resume()
        await asyncio.sleep(1.2)
        await process.reap()

    _run(loop, story())
    assert ticks == [0.0, 1.0, 4.5, 5.5]


def test_what_a_killed_process_began_never_goes_on(loop: VirtualLoop) -> None:
    ticks: list[float] = []
    cleaned: list[float] = []

    async def tidy() -> None:
        try:
            await _tick(loop, ticks)
        finally:
            cleaned.append(loop.time())

    async def story() -> None:
        process, other = Process(loop, "one", "one-1"), Process(loop, "two", "two-1")
        process.spawn(tidy(), "tick")
        others: list[float] = []
        other.spawn(_tick(loop, others), "tick")
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(2.0)
        assert (ticks, cleaned, others) == ([0.0], [], [0.0, 1.0, 2.0])
        await process.reap()
        await other.reap()
        assert (process.tasks(), cleaned) == ([], [2.5])

    _run(loop, story())


def test_a_task_belongs_to_the_process_that_began_it(loop: VirtualLoop) -> None:
    async def parent(done: list[bool]) -> None:
        await asyncio.create_task(asyncio.sleep(1.0))
        done.append(True)

    async def story() -> None:
        process, done = Process(loop, "one", "one-1"), []
        process.spawn(parent(done), "parent")
        await asyncio.sleep(0.5)
        assert len(process.tasks()) == 2
        process.pause()
        await asyncio.sleep(1.0)
        assert not done
        process.resume()
        await asyncio.sleep(0.1)
        assert done
        assert not process.tasks()

    _run(loop, story())


def test_a_wait_for_nothing_is_an_error_and_not_a_hang(loop: VirtualLoop) -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        _run(loop, wait())
