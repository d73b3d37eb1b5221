"""The processes of a running `headrace up`, by name: find, kill, stop for a while, count descriptors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.streams import until
from tests.e2e.running import Up

NATS = "nats"


def pid(up: Up, name: str) -> int:
    """The living process called `name`, or 0."""
    mark = b"/nats-server\0" if name == NATS else f"--name\0{name}\0".encode()
    return next((one for one in up.processes() if mark in _command_line(one)), 0)


def process_id(up: Up, name: str) -> str:
    """The Headrace id of the living process called `name`, such as d1-mx235xkkixxjc; "" when there is none."""
    words = _command_line(pid(up, name)).split(b"\0")
    return words[words.index(b"--id") + 1].decode() if b"--id" in words else ""


def send(up: Up, name: str, number: signal.Signals) -> int:
    """Send a signal to the process called `name`; its pid."""
    found = pid(up, name)
    assert found, f"there is no {name}"
    os.kill(found, number)
    return found


def kill(up: Up, name: str) -> int:
    return send(up, name, signal.SIGKILL)


async def back(up: Up, name: str, before: int, within: float = 60.0) -> None:
    """Until the supervisor has started `name` anew."""
    await until(lambda: pid(up, name) not in (0, before), within, lambda: f"{name} did not come back: {up.said}")


@asynccontextmanager
async def stopped(up: Up, name: str) -> AsyncIterator[None]:
    """SIGSTOP `name`, and SIGCONT at the end."""
    found = send(up, name, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(found, signal.SIGCONT)


async def stop_for(up: Up, name: str, seconds: float) -> None:
    async with stopped(up, name):
        await asyncio.sleep(seconds)  # the fault itself is a time


def descriptors(process: int) -> int:
    """How many it has open, without those of its database: of these a pool has as many as were ever needed at once."""
    return sum("/edge.db" not in _target(entry) for entry in Path(f"/proc/{process}/fd").iterdir())


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
