"""Counters of a minute that JetStream lost: noticed also by an edge that has no question for them any more.

A question notices by itself, and puts back what its edge had taken. An edge whose callers are silent, or content with what it
holds, would not, and others would be granted its part a second time. So it looks, as long as some of this minute is its own: one
addition of nothing to a counter of no limit, for all limits together. Invariants: what was put back is not put back again;
without limits in use nothing is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from schemas.errors import BusUnavailable
from services.clock import Clock
from services.edge.gate.allotment import WINDOW_S, Allotment
from services.edge.gate.meter import Add

LOOK_S = 0.5
"""An edge that notices a loss grants nothing for a second: by then the others have put theirs back."""
_KIND, _OWNER = "look", "edges"


async def watch_for_losses(add: Add, allotments: Callable[[], Iterable[Allotment]], clock: Clock) -> None:
    """Until cancelled. `allotments`: of each minute."""
    while True:
        await asyncio.sleep(LOOK_S)
        await look(add, allotments(), clock)


async def look(add: Add, allotments: Iterable[Allotment], clock: Clock) -> None:
    window = int(clock.wall() // WINDOW_S)
    ours = [one for one in allotments if one.took_in(window)]
    if not ours:
        return
    try:
        count = await add(_KIND, _OWNER, window, 0)
    except BusUnavailable:
        return  # who has a question raises the alarm; we look again
    for one in ours:
        await one.put_back(count.era)
        if one.down:
            return
