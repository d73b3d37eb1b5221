"""Small programs that behave as children do on bad days, and helpers to wait for what they do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.up.keeper import Program
from services.cli.up.output import LogFile, Output
from tests.waiting import PATIENCE_S

GOOD = (
    "import signal\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', flush=True)\n"
    "signal.sigwait([signal.SIGTERM])\n"  # blocked, and so not lost when it comes just before that
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
CRASHES = "import sys; print('out of luck', flush=True); sys.exit(3)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
)


def argv(source: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", source)


def program(name: str, source: str, *, stop_within_s: float = PATIENCE_S) -> Program:
    """`source` as a program; it sees its process id as the last argument."""
    return Program(name, argv(source), os.environ, stop_within_s)


def alive(pid: int) -> bool:
    """Whether process `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it goes between open and read
        return False


def until_now(condition: Callable[[], object], limit: float = PATIENCE_S) -> None:
    """`tests.waiting.until` without an event loop."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


@contextmanager
def output(folder: Path, name: str, said: list[str], *, verbose: bool = False) -> Iterator[Output]:
    """An `Output` that says into `said`."""
    one = Output(name, LogFile(folder / f"{name}.log"), said.append, verbose=verbose)
    yield one
    one.close()
