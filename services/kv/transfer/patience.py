"""Deadlines of one side for the other, which is not to blame for a pause of ours.

Invariant: time in which this process stood still (stopped, or its machine suspended) does not count: the peer may have spoken
meanwhile, unheard, or have stood still with it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

_LOOK_S = 0.25
"""How often is looked; a look that comes this late says that we stood still."""


def within(seconds: float | None) -> Patience:
    """As `asyncio.timeout`, for seconds in which this process ran. None: no deadline. Raises TimeoutError."""
    return Patience(seconds)


class Patience:
    """An async context manager, to be entered once."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        if self._seconds is not None:
            self._arm(self._seconds)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _arm(self, left: float) -> None:
        look = min(left, _LOOK_S)
        self._timer = self._loop.call_later(look, self._look, left, look, self._loop.time())

    def _look(self, left: float, look: float, armed: float) -> None:
        now = self._loop.time()
        passed = now - armed
        if passed < look + _LOOK_S:
            left -= passed
        if left > 0:
            self._arm(left)
        else:
            self._limit.reschedule(now)
