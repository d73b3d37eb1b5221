"""One service as a process: signals, exit codes, one line for what can be explained."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HEAD = """
import asyncio, sys
from schemas.errors import BusUnavailable
from services.cli.process import run
from services.settings import Settings, SettingsError
async def serve(settings, process, stop):
    print(process, flush=True)
"""
TAIL = "\nsys.exit(run(serve, Settings(), 'r1-0k3v9x00abcde'))\n"


@contextmanager
def service(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose service does `body`; it has started."""
    source = HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + TAIL
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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
