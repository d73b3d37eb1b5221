"""The windows that budgets are counted in: days and months in UTC. Pure functions.

`RUNNING` is the window that never ends, of what runs at once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

DAY, MONTH, RUNNING = "day", "month", "running"
ENDING = (DAY, MONTH)
"""Kinds whose names are in the order of time."""


def name(kind: str, now: float) -> str:
    """Of the window that holds `now` (Unix seconds): `day-2026-11-29`, `month-2026-11`, `running`."""
    moment = datetime.fromtimestamp(now, UTC)
    return {DAY: f"{moment:day-%Y-%m-%d}", MONTH: f"{moment:month-%Y-%m}"}.get(kind, kind)


def resets_in(kind: str, now: float) -> float:
    """Seconds from `now` to the end of the window."""
    moment = datetime.fromtimestamp(now, UTC)
    today = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    end = today + timedelta(days=1) if kind == DAY else (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (end - moment).total_seconds()
