"""`x-ratelimit-*`: how much of a caller's limits is left, on every answer to a caller that is known.

Source: the OpenAI API reference, "Rate limits", headers. `remaining` is what is left as far as this edge heard: others may have
taken of it since. Clients read whole numbers, so *no limit* is the largest that all of them can hold.
"""

from __future__ import annotations

from services.edge.api.watch import Header
from services.edge.gate.meter import REQUESTS, TOKENS, Left, Meter
from services.edge.gate.records import Caller


def rate_headers(meter: Meter, caller: Caller) -> list[Header]:
    headers = list[Header]()
    for kind, no_limit in _NO_LIMIT.items():
        left = meter.left(caller, kind)
        headers += no_limit if left is None else _told(kind, left)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI spells it: `12ms`, `1.5s`, `59s`."""
    return f"{round(seconds * 1000)}ms" if seconds < 1 else f"{round(seconds, 1):g}s"


def _told(kind: str, left: Left) -> list[Header]:
    values = {"limit": str(left.limit), "remaining": str(left.remaining), "reset": duration(left.reset_s)}
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]


_NO_LIMIT = {kind: _told(kind, Left(limit=2**31 - 1, remaining=2**31 - 1, reset_s=0.0)) for kind in (REQUESTS, TOKENS)}
