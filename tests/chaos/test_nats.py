"""The NATS server goes away for a while: streams wait for it, and after too long they end with an error; nothing needs a restart."""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest

from tests.chaos.processes import NATS, kill, pid
from tests.chaos.streams import Progress, ask_all, assert_same, longest_pause, questions, ready, undisturbed, until
from tests.chaos.tap import tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_EACH = ("--prefill", "2", "--decode", "2", "--router", "2")
PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03"}


async def down(up: Up, seconds: float) -> float:
    """Keep the server down for at least `seconds`, killing each new start; when it was killed first (monotonic seconds).

    The supervisor waits a little longer before each start, so it may take up to 15 s more.
    """
    started = time.monotonic()
    while True:
        before = kill(up, NATS)
        await until(lambda: pid(up, NATS) not in (0, before), 20.0)
        if time.monotonic() - started >= seconds:
            return started


@pytest.mark.parametrize("seconds", [0.0, 3.0])
async def test_restarted_under_32_streams(scripted_stack: StartScripted, seconds: float) -> None:
    up = scripted_stack(*TWO_OF_EACH, **PACED)
    asked = questions(32, 150)
    expected = await undisturbed(up.url, asked)
    async with tap(up) as bus:
        dead = await bus.all_of("hr.dead.*")

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            await down(up, seconds)

        answers = await ask_all(up.url, asked, fault)
        assert_same(answers, expected)
        print(f"\nlongest pause: {longest_pause(answers):.3f} s, undisturbed {longest_pause(expected):.3f} s")
        await ready(up.url)
        await bus.operator.assert_clean()
        assert not dead
