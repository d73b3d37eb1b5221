"""Tells every process that one is dead, as its supervisor saw it.

Invariant: only what was seen is told. An exit code of 0 is *left*, everything else *killed*.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.state import Cause
from schemas.subjects import Subjects
from services.bus.deaths import announce
from services.bus.interface import Bus
from services.telemetry.logs import fields

_log = logging.getLogger("headrace.up")


class Obituaries:
    """Announcements in the background; `finish` waits for those under way."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._running: set[asyncio.Task[None]] = set()

    def announce(self, process: str, code: int) -> None:
        task = asyncio.create_task(self._tell(process, Cause.LEFT if code == 0 else Cause.KILLED))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self, timeout: float) -> None:
        """Every announcement has been sent, or `timeout` seconds are over."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def _tell(self, process: str, cause: Cause) -> None:
        if not await announce(self._bus, self._subjects, process, cause):
            _log.warning("NATS is down, so nobody heard of a death", extra=fields(process=process))
