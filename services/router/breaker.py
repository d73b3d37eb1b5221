"""A circuit breaker for one worker: who often fails or answers slowly is left out, and comes back one piece of work at a time.

Owns: one worker's recent outcomes. Must not know: the worker, the clock, what was asked. Invariant: `bars` is advice; a pool
whose workers are all barred uses all of them, so the last of a pool is never left out.

States: closed → (failures) → open for a while → half open: one piece of work at once, and after each success twice as many, until
it is closed again; a failure while it is half open opens it for twice as long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 20
"""Outcomes that are looked at."""
FAILURES = 5
"""So many of them open the circuit, if they are at least half of the window's."""
OPEN_S, OPEN_MAX_S = 2.0, 60.0
HEALED = 16
"""Pieces of work at once after which it is closed again."""
SLOW_S = 0.05
"""An answer that takes longer is a failure: an admission computes nothing."""


@dataclass(slots=True)
class Breaker:
    """Times are monotonic seconds, passed in."""

    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    until: float = 0.0
    open_s: float = OPEN_S
    allowance: int = 0
    """0 = closed."""

    def outcome(self, ok: bool, now: float) -> bool:
        """One answer, or none. True when that changed what `bars` says."""
        if self.allowance:
            return self._probed(ok, now)
        self.outcomes.append(ok)
        failures = self.outcomes.count(False)
        if ok or failures < FAILURES or 2 * failures < len(self.outcomes):
            return False
        self._open(now)
        return True

    def bars(self, now: float, asked: int) -> bool:
        """Whether it should get nothing now, having `asked` pieces of work that its own numbers do not contain yet."""
        return self.allowance > 0 and (now < self.until or asked >= self.allowance)

    def _probed(self, ok: bool, now: float) -> bool:
        if now < self.until:
            return False  # an answer to what was asked before
        if not ok:
            self.open_s = min(OPEN_MAX_S, 2 * self.open_s)
            self._open(now)
        else:
            self.allowance *= 2
            if self.allowance > HEALED:
                self.allowance, self.open_s = 0, OPEN_S
        return True

    def _open(self, now: float) -> None:
        self.outcomes.clear()
        self.allowance, self.until = 1, now + self.open_s
