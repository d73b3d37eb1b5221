"""SIGSTOP for 10 s of either side of a transfer, and of a decoding worker: who wakes after its leases ran out drops that work."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.processes import stop_for
from tests.chaos.streams import Progress, ask_all, assert_same, longest_pause, questions, undisturbed
from tests.chaos.tap import Finds, addressee, handing_off, tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_EACH = ("--prefill", "2", "--decode", "2")
BIG_BLOCKS = {
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03",
    "HEADRACE_SCRIPTED__BLOCK_BYTES": str(2 * 2**20),
    "HEADRACE_WORKER__KV_BLOCKS": "600",
}
UNDER_PRESSURE = {
    # 32 streams of 11 blocks want 352; each decode worker has 200 and, alone, must preempt.
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03",
    "HEADRACE_WORKER__KV_BLOCKS": "200",
}
STOPPED_S = 10.0


@pytest.mark.parametrize("side", [handing_off, addressee], ids=["prefill", "decode"])
async def test_one_side_of_a_transfer(scripted_stack: StartScripted, side: Finds) -> None:
    up = scripted_stack(*TWO_OF_EACH, **BIG_BLOCKS)
    asked = questions(32, 80)
    expected = await undisturbed(up.url, asked)
    async with tap(up) as bus:
        stops: list[asyncio.Task[None]] = []

        def stop(name: str) -> None:
            stops.append(asyncio.create_task(stop_for(up, name, STOPPED_S)))

        async def fault(_: Progress) -> None:
            await bus.first("hr.decode.*.handoff", side, stop)

        answers = await ask_all(up.url, asked, fault)
        assert_same(answers, expected)
        print(f"\nlongest pause: {longest_pause(answers):.3f} s")
        await asyncio.gather(*stops)
        await bus.operator.assert_clean()


async def test_a_decoding_worker_with_the_pool_under_pressure(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_OF_EACH, **UNDER_PRESSURE)
    asked = questions(32, 120)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        await stop_for(up, "d1", STOPPED_S)

    answers = await ask_all(up.url, asked, fault)
    assert_same(answers, expected)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s")
    async with operator(up) as op:
        await op.assert_clean()
