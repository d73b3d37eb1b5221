"""Which edges live, and how their clocks differ from ours.

Owns what was heard of each edge. Invariant: no edge is called silent because our own connection was down, or just came back, or
because the bus seems to carry nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.job import Deadlines
from schemas.state import EdgeBeat
from services.bus.interface import Bus
from services.bus.silence import SILENT_S, patience
from services.clock import Clock

_FORGET_S = 120.0
_WINDOW_S = 20.0
"""Two of these windows are looked at."""


@dataclass(slots=True)
class _Edge:
    """`low` is the smallest offset since `since`, `before` that of the window before it."""

    heard: float
    since: float = 0.0
    low: float | None = None
    before: float | None = None

    @property
    def offset(self) -> float:
        """0 until the edge was heard."""
        seen = [offset for offset in (self.low, self.before) if offset is not None]
        return min(seen, default=0.0)


class EdgeWatch:
    """`offset` is our wall clock minus the edge's, the smallest seen lately: what is more is time on the way. A clock that is set
    counts within 40 s."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._edges: dict[str, _Edge] = {}
        self._dead: dict[str, float] = {}

    def beat(self, beat: EdgeBeat) -> None:
        now, offset = self._clock.monotonic(), self._clock.wall() - beat.sent
        edge = self._edges.setdefault(beat.process, _Edge(now, now))
        if now - edge.since > _WINDOW_S:
            edge.since, edge.before, edge.low = now, edge.low, None
        edge.heard = now
        edge.low = offset if edge.low is None else min(offset, edge.low)
        if beat.left:
            self.died(beat.process)

    def expect(self, edge: str) -> None:
        """A job of this edge begins here: its silence counts from now."""
        self._edges.setdefault(edge, _Edge(self._clock.monotonic(), self._clock.monotonic()))

    def died(self, edge: str) -> None:
        """Proven dead, or left: nothing is computed for it any more."""
        self._edges.pop(edge, None)
        self._dead[edge] = self._clock.monotonic()

    def gone(self, edge: str) -> bool:
        """Dead, left or silent for 3 s (10 s when others fell silent with it)."""
        if edge in self._dead:
            return True
        if self._bus.down_for() > 0 or self._bus.steady_for() < SILENT_S:
            return False
        known, now = self._edges.get(edge), self._clock.monotonic()
        if known is None or now - known.heard <= SILENT_S:
            return False
        return now - known.heard > patience(known.heard, [other.heard for other in self._edges.values()], now)

    def alive(self) -> list[str]:
        """Those that are heard."""
        return [edge for edge in self._edges if not self.gone(edge)]

    def remaining(self, edge: str, deadlines: Deadlines, limit: float) -> float:
        """Seconds until `limit` after the stamp, by our clock."""
        known = self._edges.get(edge)
        offset = known.offset if known is not None else 0.0
        return deadlines.stamp + offset + limit - self._clock.wall()

    def sweep(self) -> None:
        """Forget edges of long ago."""
        old = self._clock.monotonic() - _FORGET_S
        self._edges = {name: edge for name, edge in self._edges.items() if edge.heard > old}
        self._dead = {name: at for name, at in self._dead.items() if at > old}
