"""One service as a process: signals, exit codes, one line for what can be explained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.process import ALIVE_EVERY_S

HEAD = """
import asyncio, sys
from schemas.errors import BusUnavailable
from services.cli.process import run
from services.settings.errors import SettingsError
from services.settings.settings import Settings
async def serve(settings, process, stop, loaded):
    print(process, flush=True)
"""
TAIL = "\nsys.exit(run(serve, Settings(), 'r1-0k3v9x00abcde'))\n"


@contextmanager
def service(body: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose service does `body`; it has started."""
    source = HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + TAIL
    with subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "r1-0k3v9x00abcde\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    with service("await stop.wait()\nprint('drained')") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "drained\n")
    assert f"stopping on {number.name}" in err


def test_the_second_signal_ends_it_at_once() -> None:
    with service("await stop.wait()\nprint('draining', flush=True)\nawait asyncio.sleep(600)") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_what_can_be_explained_is_one_line() -> None:
    with service("raise BusUnavailable('NATS cannot be reached at x')") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "ERROR r1-0k3v9x00abcde headrace.process NATS cannot be reached at x" in err
    assert "Traceback" not in err


def test_a_setting_that_turns_out_wrong_is_one_line_and_a_code_of_its_own() -> None:
    with service("raise SettingsError('worker.kv_blocks: too few')") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "ERROR r1-0k3v9x00abcde headrace.process worker.kv_blocks: too few" in err
    assert "Traceback" not in err


def test_a_bug_is_logged_with_its_traceback_on_one_line() -> None:
    with service("raise ZeroDivisionError('a bug')") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "Traceback" in err
    assert "ZeroDivisionError" in err


def test_its_collector_looks_no_more_at_what_was_loaded() -> None:
    body = "import gc\nbefore = gc.get_freeze_count()\nloaded()\nprint(before, gc.get_freeze_count() > 1000)"
    with service(body) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "0 True\n"  # it may have come with the line before, which `communicate` does not know
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_service_shows_that_its_event_loop_turns(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    with service("await stop.wait()", HEADRACE_ALIVE_FILE=str(alive)):
        wait_until(alive.exists)
        os.utime(alive, (1, 1))
        wait_until(lambda: alive.stat().st_mtime > 1)


def test_a_service_whose_event_loop_stands_still_shows_no_life(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    body = "await asyncio.sleep(0.1)\nimport time\nprint('hangs', flush=True)\ntime.sleep(600)"
    with service(body, HEADRACE_ALIVE_FILE=str(alive)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        os.utime(alive, (1, 1))
        time.sleep(2 * ALIVE_EVERY_S)
        assert alive.stat().st_mtime == 1
