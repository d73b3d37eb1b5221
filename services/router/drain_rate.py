"""How fast the queue empties: jobs of a model that this router took out of it and placed, over the last seconds."""

from __future__ import annotations

from collections import defaultdict, deque

from services.clock import Clock

WINDOW_S = 10.0


class DrainRate:
    """Jobs per second, by model, over the last 10 s or since the router started if that is less."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._placed: defaultdict[str, deque[float]] = defaultdict(deque)

    def add(self, model: str) -> None:
        """One job was placed now."""
        self._placed[model].append(self._clock.monotonic())

    def of(self, model: str) -> float:
        now, placed = self._clock.monotonic(), self._placed[model]
        while placed and placed[0] <= now - WINDOW_S:
            placed.popleft()
        return len(placed) / max(1.0, min(WINDOW_S, now - self._started))
