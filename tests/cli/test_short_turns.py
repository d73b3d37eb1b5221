"""The event loop's thread has short turns, and no other one. What the kernel says of a thread is the judge."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.cli.short_turns import TURN_NS, take_short_turns

_SAID = Path("/proc/thread-self/sched")
_PROCESS = """
import asyncio
from services.cli.process import run
from services.settings.settings import Settings
from tests.cli.test_short_turns import turn
async def serve(settings, process, stop, loaded):
    print(turn(), await asyncio.to_thread(turn))
run(serve, Settings(), 'r1-0k3v9x00abcde')
"""


def turn() -> int:
    """Nanoseconds of a turn of this thread; 0 where the kernel does not say."""
    found = re.search(r"^se\.slice\s*:\s*(\d+)$", _SAID.read_text(), re.MULTILINE) if _SAID.exists() else None
    return int(found[1]) if found else 0


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2])) if platform.system() == "Linux" else (0,)


needs_turns = pytest.mark.skipif(
    _kernel() < (6, 12) or not turn(), reason="this system has no turns of a thread's own, or hides them"
)


@needs_turns
def test_a_thread_takes_short_turns_and_those_it_starts_the_usual_ones() -> None:
    def own() -> tuple[bool, int, int]:
        with ThreadPoolExecutor(1) as started:
            return take_short_turns(), turn(), started.submit(turn).result()

    with ThreadPoolExecutor(1) as alone:  # so that no other test has short turns
        taken, mine, theirs = alone.submit(own).result()
    assert (mine, theirs) == (TURN_NS if taken else turn(), turn())


@needs_turns
def test_a_service_has_its_event_loop_on_such_a_thread() -> None:
    command, root = [sys.executable, "-c", _PROCESS], Path(__file__).parents[2]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    mine, theirs = map(int, said.stdout.split())
    with ThreadPoolExecutor(1) as alone:
        taken = alone.submit(take_short_turns).result()
    assert (mine, theirs) == (TURN_NS if taken else turn(), turn())


@needs_turns
def test_a_thread_of_another_policy_is_left_as_it_is() -> None:
    def batch() -> tuple[bool, int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_short_turns(), os.sched_getscheduler(0), turn()

    with ThreadPoolExecutor(1) as alone:
        assert alone.submit(batch).result() == (False, os.SCHED_BATCH, turn())
