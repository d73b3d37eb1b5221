"""How late the event loop of this process is: a task that sleeps a little, again and again, and records what was too long.

Late means that something held the loop up, or that the system gave the process no core. Costs 20 wake-ups a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.telemetry.metrics import Metrics

PERIOD_S = 0.05


async def record_loop_lag(metrics: Metrics, now: Callable[[], float]) -> None:
    """Until it is cancelled. `now`: monotonic seconds, but not the loop's, which uvloop stops while a callback runs."""
    while True:
        due = now() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        metrics.event_loop_lag.record(max(0.0, now() - due))
