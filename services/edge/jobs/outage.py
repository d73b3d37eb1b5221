"""How long something has been out of reach, as far as anybody tried. Pure: times come from the caller, in monotonic seconds."""

from __future__ import annotations

import math


class Outage:
    """Begins with a failure and ends with a success. Failures more than `patience_s` apart are of two outages."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since = self._last = -math.inf

    def failed(self, now: float) -> bool:
        """Whether it has lasted longer than our patience."""
        if now - self._last > self._patience_s:
            self._since = now
        self._last = now
        return now - self._since > self._patience_s

    def worked(self) -> None:
        self._since = self._last = -math.inf
