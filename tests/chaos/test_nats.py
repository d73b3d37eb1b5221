"""The NATS server goes away: streams wait for it, after too long they end with an error, and nothing needs a restart."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.chaos.processes import NATS, back, kill, pid
from tests.chaos.streams import Answer, Progress, ask_all, assert_same, longest_pause, questions, ready, undisturbed, until
from tests.chaos.tap import tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_EACH = ("--prefill", "2", "--decode", "2", "--router", "2")
PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03"}
SIXTEEN_ROWS = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.02", "HEADRACE_WORKER__MAX_BATCH": "16"}


async def down(up: Up, seconds: float) -> None:
    """Kill the server, and keep it down for `seconds`: who would start it again stands still. (To kill each new start leaves
    a moment in which everybody is connected again.)
    """
    os.kill(up.process.pid, signal.SIGSTOP)
    try:
        before = kill(up, NATS)
        await asyncio.sleep(seconds)  # the fault itself is a time
    finally:
        os.kill(up.process.pid, signal.SIGCONT)
    await back(up, NATS, before)


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


async def test_restarted_while_jobs_wait(scripted_stack: StartScripted) -> None:
    """The queue lies in the server's memory: their edge puts them there again."""
    up = scripted_stack(*TWO_OF_EACH, **SIXTEEN_ROWS)
    asked = questions(120, 60)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has_begun()
        await until(lambda: sum(pieces > 10 for pieces in progress.pieces) >= 20, 30.0)
        await down(up, 0.0)

    assert_same(await ask_all(up.url, asked, fault), expected)
    async with operator(up) as op:
        await op.assert_clean()


@pytest.mark.parametrize("seconds", [16.0, 60.0])
async def test_down_for_longer_than_streams_wait(scripted_stack: StartScripted, seconds: float) -> None:
    """Streams end with an error in them, new requests are refused, and everything recovers by itself; nothing old runs."""
    up = scripted_stack(*TWO_OF_EACH, **PACED)
    before = {name: pid(up, name) for name in ("e1", "r1", "r2", "p1", "p2", "d1", "d2")}
    refused: list[Answer] = []

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        outage = asyncio.create_task(down(up, seconds))
        for _ in range(2):
            await asyncio.sleep(seconds / 4)  # into the outage, and further
            refused.extend(await ask_all(up.url, questions(4, 5)))
        await outage

    answers = await ask_all(up.url, questions(32, 1500), fault)
    assert {(answer.status, answer.retry_after) for answer in refused} == {(503, "1")}
    assert all(answer.status == 200 and answer.error and answer.whole for answer in answers), answers[:2]
    assert {answer.error["code"] for answer in answers if answer.error} == {"bus_unavailable"}
    await ready(up.url)
    async with operator(up) as op:
        await op.assert_clean()
    await undisturbed(up.url, questions(8, 20))
    assert {name: pid(up, name) for name in before} == before, "something was restarted"


async def test_the_store_is_deleted(scripted_stack: StartScripted) -> None:
    """JetStream comes back without its data: stream, consumers and registry are made again."""
    up = scripted_stack(*TWO_OF_EACH, **SIXTEEN_ROWS)
    asked = questions(120, 30)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has_begun()
        await until(lambda: sum(pieces > 5 for pieces in progress.pieces) >= 20, 30.0)
        (up.home / "nats" / "jetstream").rename(up.home / "nats" / "lost")  # the server still writes there
        await down(up, 0.0)

    assert_same(await ask_all(up.url, asked, fault), expected)
    assert_same(await ask_all(up.url, asked), expected)
    async with operator(up) as op:
        await op.assert_clean()
