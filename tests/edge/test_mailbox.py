"""A mailbox in virtual time: each wait ends when it should, though all of them share one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.edge.jobs.mailbox import Mailbox
from tests.simulation.loop import VirtualLoop

Story = Callable[[Mailbox], Awaitable[None]]


def played(story: Story) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(_play(story))


async def _play(story: Story) -> None:
    await story(Mailbox())


def now() -> float:
    return asyncio.get_running_loop().time()


def wake_at(mailbox: Mailbox, when: float) -> None:
    asyncio.get_running_loop().call_at(when, mailbox.wake)


def test_a_wake_before_the_wait_is_not_lost_and_counts_once() -> None:
    async def story(mailbox: Mailbox) -> None:
        mailbox.wake()
        mailbox.wake()
        assert await mailbox.wait(10.0)
        assert now() == 0.0
        assert not await mailbox.wait(10.0)
        assert now() == 10.0

    played(story)


def test_a_wait_is_not_cut_short_by_the_one_before() -> None:
    async def story(mailbox: Mailbox) -> None:
        wake_at(mailbox, 4.0)
        assert await mailbox.wait(10.0)
        assert not await mailbox.wait(10.0)
        assert now() == 14.0

    played(story)


def test_a_shorter_wait_than_the_one_before_ends_in_its_own_time() -> None:
    async def story(mailbox: Mailbox) -> None:
        wake_at(mailbox, 1.0)
        assert await mailbox.wait(100.0)
        assert not await mailbox.wait(2.0)
        assert now() == 3.0

    played(story)


def test_a_wait_after_the_timer_rang_for_nobody() -> None:
    async def story(mailbox: Mailbox) -> None:
        wake_at(mailbox, 1.0)
        assert await mailbox.wait(10.0)
        await asyncio.sleep(20.0)
        assert not await mailbox.wait(5.0)
        assert now() == 26.0

    played(story)


def test_a_wait_that_is_cancelled_leaves_the_next_one_whole() -> None:
    async def story(mailbox: Mailbox) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await mailbox.wait(10.0)
        wake_at(mailbox, 12.0)
        assert await mailbox.wait(20.0)
        assert now() == 12.0

    played(story)


def test_many_waits_leave_one_timer() -> None:
    async def story(mailbox: Mailbox) -> None:
        for turn in range(1, 1000):
            wake_at(mailbox, turn * 0.001)
            assert await mailbox.wait(10.0)
        waiting = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        assert len(waiting) == 1

    played(story)
