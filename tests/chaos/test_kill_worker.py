"""kill -9 of workers under load: no stream fails, and each reads as in a run that nothing disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.chaos.processes import back, kill, pid, send
from tests.chaos.streams import Progress, ask_all, assert_same, longest_pause, questions, undisturbed, until
from tests.chaos.tap import Finds, addressee, handed_over, handing_off, tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_AND_TWO = ("--prefill", "2", "--decode", "2", "--router", "2")
PACED = {
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03",
    "HEADRACE_SCRIPTED__BLOCK_BYTES": str(2 * 2**20),  # a transfer takes long enough to be met in the middle
    "HEADRACE_WORKER__KV_BLOCKS": "600",
}
THIRTY_TWO = questions(32, 80)


async def test_decode(scripted_stack: StartScripted) -> None:
    up = scripted_stack(*TWO_AND_TWO, **PACED)
    expected = await undisturbed(up.url, THIRTY_TWO)
    killed: list[int] = []

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        killed.append(kill(up, "d1"))

    answers = await ask_all(up.url, THIRTY_TWO, fault)
    assert_same(answers, expected)
    print(f"\nlongest pause: {longest_pause(answers):.3f} s, undisturbed {longest_pause(expected):.3f} s")
    await back(up, "d1", killed[0])
    async with operator(up) as op:
        await op.assert_clean()


@pytest.mark.parametrize(
    ("subject", "find"),
    [("hr.prefill.*.submit", addressee), ("hr.decode.*.handoff", handing_off), ("hr.reply.*", handed_over)],
    ids=["before", "during", "after"],
)
async def test_prefill_around_the_transfer(scripted_stack: StartScripted, subject: str, find: Finds) -> None:
    up = scripted_stack(*TWO_AND_TWO, **PACED)
    expected = await undisturbed(up.url, THIRTY_TWO)
    async with tap(up) as bus:
        before = {name: pid(up, name) for name in ("p1", "p2")}

        def strike(name: str) -> None:
            kill(up, name if name in before else "p1")

        async def fault(_: Progress) -> None:
            await bus.first(subject, find, strike)

        assert_same(await ask_all(up.url, THIRTY_TWO, fault), expected)
        await until(lambda: any(pid(up, name) not in (0, before[name]) for name in before), 30.0)
        await bus.operator.assert_clean()


async def test_every_worker_in_turn(scripted_stack: StartScripted) -> None:
    """Some streams lose two owners and are suspects from then on: they go on one after another, so this takes a while."""
    up = scripted_stack(*TWO_AND_TWO, **PACED)
    asked = questions(32, 150)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        for pieces, name in ((5, "d1"), (30, "p2"), (60, "d2"), (90, "p1")):
            await progress.everybody_has(pieces, 150.0)
            await back(up, name, kill(up, name))

    assert_same(await ask_all(up.url, asked, fault), expected)
    async with operator(up) as op:
        await op.assert_clean()


async def test_a_worker_that_is_stopped_and_replaced_under_its_name(scripted_stack: StartScripted) -> None:
    """Nobody sees it exit: a newer start of the name is the proof, and the older one, when it wakes, computes for nobody."""
    up = scripted_stack(*TWO_AND_TWO, **PACED)
    expected = await undisturbed(up.url, THIRTY_TWO)
    old, new = 0, None

    async def fault(progress: Progress) -> None:
        nonlocal old, new
        await progress.everybody_has(3)
        old = send(up, "d1", signal.SIGSTOP)
        new = _another(old)

    try:
        answers = await ask_all(up.url, THIRTY_TWO, fault)
        assert_same(answers, expected)
        print(f"\nlongest pause: {longest_pause(answers):.3f} s")
        os.kill(old, signal.SIGCONT)
        async with operator(up) as op:
            await op.assert_clean()
    finally:
        if new is not None:
            new.terminate()
            new.wait(20)
    async with operator(up) as op:
        await op.until(lambda found: sum(name.startswith("d1-") for name in found) == 1)


def _another(process: int) -> subprocess.Popen[bytes]:
    """A second start of the program that runs as `process`, with an id of its own."""
    argv = [word.decode() for word in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]]
    at = argv.index("--id")
    env = dict(item.decode().split("=", 1) for item in Path(f"/proc/{process}/environ").read_bytes().split(b"\0") if item)
    return subprocess.Popen(argv[:at] + argv[at + 2 :], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
