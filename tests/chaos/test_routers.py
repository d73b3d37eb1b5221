"""A router that dies or stands still with 200 jobs in flight: the other one goes on, and every job is answered once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chaos.processes import back, kill, process_id, stop_for
from tests.chaos.streams import Progress, ask_all, assert_same, questions, ready, undisturbed, until
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_EACH = ("--prefill", "2", "--decode", "2", "--router", "2")
SIXTEEN_ROWS = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.02", "HEADRACE_WORKER__MAX_BATCH": "16"}
"""So that most of the jobs wait in JetStream."""
TWO_HUNDRED = questions(200, 24)


@pytest.mark.parametrize("moments", [1, 3])
async def test_a_router_is_killed(scripted_stack: StartScripted, moments: int) -> None:
    up = scripted_stack(*TWO_OF_EACH, **SIXTEEN_ROWS)
    expected = await undisturbed(up.url, TWO_HUNDRED)

    async def fault(progress: Progress) -> None:
        for moment in range(1, moments + 1):
            await answered(progress, 30 * moment)
            await back(up, f"r{moment % 2 + 1}", kill(up, f"r{moment % 2 + 1}"))

    assert_same(await ask_all(up.url, TWO_HUNDRED, fault), expected)
    async with operator(up) as op:
        await op.assert_clean()
        await assert_nothing_waits(up, op)


async def test_both_routers_are_killed(scripted_stack: StartScripted) -> None:
    """For a second there is none: new work waits for it in vain, work that is owned does not need it."""
    up = scripted_stack(*TWO_OF_EACH, **SIXTEEN_ROWS)
    asked = questions(32, 80)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(2)
        for name, before in [(name, kill(up, name)) for name in ("r1", "r2")]:
            await back(up, name, before)

    assert_same(await ask_all(up.url, asked, fault), expected)
    async with operator(up) as op:
        await both_route(op)
    await ready(up.url)


async def test_a_router_stands_still_for_ten_seconds(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_OF_EACH, **SIXTEEN_ROWS)
    expected = await undisturbed(up.url, TWO_HUNDRED)

    async def fault(progress: Progress) -> None:
        await answered(progress, 30)
        await stop_for(up, "r1", 10.0)

    assert_same(await ask_all(up.url, TWO_HUNDRED, fault), expected)
    async with operator(up) as op:
        await op.assert_clean()
        await assert_nothing_waits(up, op)


async def answered(progress: Progress, streams: int) -> None:
    """Until so many streams have begun, and the others wait."""
    await progress.everybody_has_begun()
    await until(lambda: sum(pieces > 0 for pieces in progress.pieces) >= streams, 60.0)


async def both_route(op: Operator) -> None:
    """Until each router takes work: it answers an operator last of all."""
    await op.several("router", 2)


async def assert_nothing_waits(up: Up, op: Operator) -> None:
    """Until the queue is empty, as each router sees it."""
    await both_route(op)
    for name in ("r1", "r2"):
        subject = f"hr.admin.router.{process_id(up, name)}.status"
        async with asyncio.timeout(PATIENCE_S):
            while _waiting(await op.ask(subject)):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)


def _waiting(status: dict[str, Any]) -> int:
    return sum(sum(model["waiting"].values()) for model in status["models"].values())
