"""An edge that dies or stands still: nothing is computed for it any more, and one that wakes up goes on where it was."""

from __future__ import annotations

import pytest

from services.bus.silence import SILENT_S
from tests.chaos.processes import back, kill, stopped
from tests.chaos.streams import BROKE_OFF, Progress, ask_all, assert_same, questions, ready, undisturbed
from tests.chaos.workers import Workers
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_EDGES = ("--prefill", "2", "--decode", "2", "--edge", "2")
NAMES = ("p1", "p2", "d1", "d2")
LONG = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03"}


async def test_killed(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_EDGES, **LONG)
    async with operator(up) as op:
        workers = Workers(op, up, NAMES)
        took = 0.0

        async def fault(progress: Progress) -> None:
            nonlocal took
            await progress.everybody_has(3)
            before = kill(up, "e1")
            took = await workers.idle_after(PATIENCE_S)
            await back(up, "e1", before)
            await ready(up.url)

        answers = await ask_all(up.url, questions(32, 1000), fault)
        assert {answer.status for answer in answers} == {BROKE_OFF}
        print(f"\nidle after {took:.3f} s")
        await op.assert_clean()


async def test_the_streams_of_another_edge_go_on(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_EDGES, **LONG)
    asked, second = questions(16, 80), f"http://127.0.0.1:{up.port + 1}"
    expected = await undisturbed(second, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        await back(up, "e1", kill(up, "e1"))
        await ready(up.url)

    assert_same(await ask_all(second, asked, fault), expected)


async def test_stopped_without_a_proof(scripted_stack: StartScripted) -> None:
    """Its jobs stop after its silence; when it goes on, it resumes each of them."""
    up = scripted_stack(*TWO_EDGES, **LONG)
    asked = questions(32, 80)
    expected = await undisturbed(up.url, asked)
    async with operator(up) as op:
        workers = Workers(op, up, NAMES)
        took = 0.0

        async def fault(progress: Progress) -> None:
            nonlocal took
            await progress.everybody_has(3)
            async with stopped(up, "e1"):
                took = await workers.idle_after(SILENT_S + PATIENCE_S)

        assert_same(await ask_all(up.url, asked, fault), expected)
        print(f"\nidle after {took:.3f} s")
        await op.assert_clean()


async def test_a_new_start_serves(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_EDGES, **LONG)
    await back(up, "e1", kill(up, "e1"))
    await ready(up.url)
    await undisturbed(up.url, questions(32, 10))
