"""Jobs that may kill this worker and wait for their turn to be alone here: a line, first come, first served.

Owns their places. A place is kept by asking again, which edges make happen every 50-200 ms. Invariants: while somebody waits
nobody else is taken, so room comes; of those that keep asking, the first gets it: nobody waits for more than those before it.
"""

from __future__ import annotations

from services.clock import Clock

KEEP_S = 2.0
"""Without asking again: a job that ended, or went elsewhere."""
PASS_S = 0.3
"""Who has not asked for so long is passed over, and keeps its place."""


class SuspectLine:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}
        """job -> when it asked last, in order of their first asking."""

    def __bool__(self) -> bool:
        """Somebody waits."""
        self._forget_old()
        return bool(self._asked)

    def ask(self, job: str) -> bool:
        """Take a place, or keep it. True when it is this job's turn."""
        self._forget_old()
        now = self._asked[job] = self._clock.monotonic()
        return next(other for other, at in self._asked.items() if now - at <= PASS_S) == job

    def leave(self, job: str) -> None:
        """It has what it waited for."""
        self._asked.pop(job, None)

    def _forget_old(self) -> None:
        oldest = self._clock.monotonic() - KEEP_S
        self._asked = {job: at for job, at in self._asked.items() if at > oldest}
