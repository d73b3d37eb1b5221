"""A death, told to everybody who listens: `hr.dead.<id>` three times, 100 ms apart."""

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


async def announce(bus: Bus, subjects: Subjects, process: str, cause: Cause, still: Callable[[], bool] = lambda: True) -> bool:
    """Say that `process` is dead, as long as that is `still` so. What cannot be sent is left out: each word stands alone.

    False: none could be sent.
    """
    said = False
    for time in range(TIMES):
        if time:
            await asyncio.sleep(APART_S)
        if not still():
            break
        try:
            send(bus, subjects.dead(process), Death(process=process, cause=cause))
        except BusError:
            continue
        said = True
    return said
