"""Long work on an event loop, in turns short enough for everybody else on it."""

from __future__ import annotations

import asyncio
import time

TURN_S = 0.0005


class Pace:
    """`await pace()` between pieces of work gives the loop to others when this turn has been long enough."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def __call__(self) -> None:
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN_S
