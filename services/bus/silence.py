"""Dead, or just quiet? How long a peer may be silent before it is given up without proof. A pure function.

One peer that falls silent is probably dead; several at once are probably behind a bus that does not carry them.
"""

from __future__ import annotations

from collections.abc import Collection

SILENT_S = 3.0
"""Silence that ends a lease, while our own connection is steady."""
BUS_S = 10.0
"""The same, when it looks like the bus."""
TOGETHER_S = 1.0


def patience(last: float, heard: Collection[float], now: float) -> float:
    """Seconds of silence to grant a peer that was last heard at `last`; `heard` says it of every peer, this one included.

    The bus rule: at least two peers, and at least a third of all, that fell silent within a second of one another.
    """
    lately = [at for at in heard if now - at <= BUS_S + TOGETHER_S]
    together = sum(abs(at - last) <= TOGETHER_S and now - at > SILENT_S - TOGETHER_S for at in lately)
    return BUS_S if together >= 2 and 3 * together >= len(lately) else SILENT_S
