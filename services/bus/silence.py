"""Dead, or just quiet? How long a peer may be silent before it is given up without proof. Pure functions.

One peer that falls silent is probably dead; several at once are probably behind a bus that does not carry them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

SILENT_S = 3.0
"""Silence that ends a lease, while our own connection is steady."""
BUS_S = 10.0
"""The same, when it looks like the bus."""
QUIET_S = 0.4
"""Who spoke since is not away, whatever its connection did: workers speak every 250 ms, routers every 100 ms."""
TOGETHER_S = 1.0


class Line(Protocol):
    """The part of a bus that says whether silence means anything."""

    def steady_for(self) -> float: ...


def patience(last: float, heard: Collection[float], now: float) -> float:
    """Seconds of silence to grant a peer that was last heard at `last`; `heard` says it of every peer, this one included."""
    return BUS_S if is_the_bus(last, heard, now, SILENT_S - TOGETHER_S) else SILENT_S


def is_the_bus(last: float, heard: Collection[float], now: float, quiet_s: float) -> bool:
    """The bus rule: at least two peers, and at least a third of all, that fell silent within a second of one another.

    `quiet_s`: who was heard within so many seconds has not fallen silent.
    """
    lately = [at for at in heard if now - at <= BUS_S + TOGETHER_S]
    together = sum(abs(at - last) <= TOGETHER_S and now - at > quiet_s for at in lately)
    return together >= 2 and 3 * together >= len(lately)
