"""How long a connection has been down, or up again: what every timer over NATS is held against."""

from __future__ import annotations

from services.clock import Clock


class Uptime:
    """It is up from the start, and counts as steady for ever until it was down once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._down_since: float | None = None
        self._up_since: float | None = None

    @property
    def down(self) -> bool:
        return self._down_since is not None

    def went_down(self) -> None:
        if self._down_since is None:
            self._down_since = self._clock.monotonic()

    def came_up(self) -> None:
        self._down_since, self._up_since = None, self._clock.monotonic()

    def down_for(self) -> float:
        """Seconds, 0 while it is up."""
        return 0.0 if self._down_since is None else self._clock.monotonic() - self._down_since

    def steady_for(self) -> float:
        """Seconds since it came back, infinite if it was never down, 0 while it is."""
        if self._down_since is not None:
            return 0.0
        return float("inf") if self._up_since is None else self._clock.monotonic() - self._up_since
