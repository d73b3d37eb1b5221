"""Proves that a pause of the whole process is no time for what a test runs in it."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from services.clock import SystemClock
from tests.waiting import PATIENCE_S

STOOD_S = 1.5
STOPPER = f"""
import os, signal, sys, time
os.kill(int(sys.argv[1]), signal.SIGSTOP)
time.sleep({STOOD_S})
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


async def test_a_timer_does_not_run_out_while_the_process_stands_still() -> None:
    clock, loop = SystemClock(), asyncio.get_running_loop()
    began, real, told = clock.monotonic(), time.perf_counter(), loop.time()
    stopper = await asyncio.create_subprocess_exec(sys.executable, "-c", STOPPER, str(os.getpid()))
    assert await stopper.wait() == 0
    stood = time.perf_counter() - real
    assert stood > STOOD_S
    for passed in (clock.monotonic() - began, loop.time() - told):
        assert passed < stood - STOOD_S / 2


def test_it_runs_as_the_real_one_does_while_nothing_stands_still() -> None:
    real, began = time.perf_counter(), time.monotonic()  # the real one's span holds the other's: it takes a moment to read both
    while time.monotonic() - began < 0.1:
        assert time.perf_counter() - real < PATIENCE_S
        time.sleep(0.3)
    assert time.monotonic() - began <= time.perf_counter() - real
