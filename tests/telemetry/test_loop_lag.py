"""A loop that is held up is recorded as late by as much; one that is not is on time."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress

from services.telemetry.loop_lag import record_loop_lag
from services.telemetry.metrics import Metrics
from tests.waiting import until

HELD_S = 0.3


def hold_up() -> None:
    """For so long by the clock that the lag is measured with."""
    until_then = time.monotonic() + HELD_S
    while time.monotonic() < until_then:
        time.sleep(0.01)


def over(metrics: Metrics, bound: str) -> int:
    """How many samples were more than `bound` seconds late."""
    text = metrics.prometheus_text().decode()
    counts = dict(re.findall(r'headrace_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9]+)', text))
    return int(counts.get("+Inf", 0)) - int(counts.get(bound, 0))


async def test_a_callback_that_blocks_shows_as_lag() -> None:
    metrics = Metrics.collecting("e1-0000000000000")
    recording = asyncio.create_task(record_loop_lag(metrics, time.monotonic))
    try:
        await until(lambda: b"lag_seconds_count" in metrics.prometheus_text())
        before = over(metrics, "0.2")
        asyncio.get_running_loop().call_soon(hold_up)
        await until(lambda: over(metrics, "0.2") > before)
    finally:
        recording.cancel()
        with suppress(asyncio.CancelledError):
            await recording
