"""The replay ring: the last records of each run, kept until 10 s after its end, so that an edge can ask again for what was lost.

Owns copies of records, nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from schemas.control import Position
from schemas.reply import Event, Frame
from services.clock import Clock

RECORDS = 1024
KEEP_S = 10.0


@dataclass(slots=True)
class _Ring:
    reply_to: str
    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=RECORDS))
    event: Event | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What to send again, and where."""

    reply_to: str
    frames: list[Frame]
    events: list[Event]


class ReplayRing:
    """At most 1,024 frames a run, and its last event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rings: dict[int, _Ring] = {}

    def frame(self, reply_to: str, frame: Frame) -> None:
        self._ring(frame.run, reply_to).frames.append(frame)

    def event(self, reply_to: str, event: Event) -> None:
        ring = self._ring(event.run, reply_to)
        ring.event = event
        if event.state.terminal:
            ring.until = self._clock.monotonic() + KEEP_S

    def redirect(self, run: int, reply_to: str) -> None:
        """Its records go there from now on."""
        if run in self._rings:
            self._rings[run].reply_to = reply_to

    def keep(self, run: int, seconds: float) -> None:
        """Of a run that has ended: for so long."""
        if run in self._rings:
            self._rings[run].until = self._clock.monotonic() + seconds

    def close(self, run: int) -> None:
        """The run went on elsewhere."""
        if run in self._rings:
            self._rings[run].until = self._clock.monotonic() + KEEP_S

    def replay(self, run: int, positions: tuple[Position, ...]) -> Replay | None:
        """Frames from each position on, and the last event; None for a run that is forgotten."""
        ring = self._rings.get(run)
        if ring is None:
            return None
        since = {position.choice: position.index for position in positions}
        frames = [f for f in ring.frames if f.choice in since and f.index + len(f.tokens) > since[f.choice]]
        return Replay(ring.reply_to, frames, [ring.event] if ring.event is not None else [])

    def sweep(self) -> None:
        now = self._clock.monotonic()
        for run in [run for run, ring in self._rings.items() if ring.until is not None and ring.until <= now]:
            del self._rings[run]

    def _ring(self, run: int, reply_to: str) -> _Ring:
        ring = self._rings.get(run)
        if ring is None:
            ring = self._rings[run] = _Ring(reply_to)
        return ring
