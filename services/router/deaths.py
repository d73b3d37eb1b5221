"""What this router knows of deaths, told to the others: `hr.dead.<id>` three times, 100 ms apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas.errors import BusError
from schemas.state import Cause, Death
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send

TIMES = 3
APART_S = 0.1


async def announce(bus: Bus, subjects: Subjects, process: str, cause: Cause, still: Callable[[], bool] = lambda: True) -> None:
    """Say that `process` is dead, as long as that is `still` so. What cannot be sent is left out: each word stands alone."""
    for time in range(TIMES):
        if time:
            await asyncio.sleep(APART_S)
        if not still():
            return
        try:
            send(bus, subjects.dead(process), Death(process=process, cause=cause))
        except BusError:
            continue
