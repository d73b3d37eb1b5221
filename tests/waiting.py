"""Waiting on a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 15.0
"""For anything that must happen. A machine that others share may let a process stand still for seconds; no test is about that."""


async def until(condition: Callable[[], object], timeout: float = PATIENCE_S, what: str = "") -> None:
    """Returns when `condition()` is true. Raises AssertionError after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        await asyncio.sleep(0.005)
