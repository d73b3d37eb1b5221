"""How fast jobs of one tier leave the queue, and how fast they come: measured, over the last seconds. Knows no bus and no clock.

Only time in which somebody waited counts, so a quiet minute makes no queue slow, and each time between two placements is one
measurement, the present one included: a queue that stands still is seen to. Jobs leave in bursts, as batches end, so a few
measurements are none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 10.0
SAMPLES = 64
ENOUGH = 8
"""Measurements, or else a window's time of waiting, before which nothing is known."""


@dataclass(slots=True)
class Pace:
    """Of one tier. Times are monotonic seconds, passed in, and only grow."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    since: float | None = None
    """The last placement, or the first job that waited after it; None while nobody waits."""
    came: deque[float] = field(default_factory=deque)

    def offered(self, now: float) -> None:
        """A job asks to be run."""
        self.came.append(now)
        self._forget(now)

    def waits(self, jobs: int, now: float) -> None:
        """So many wait now."""
        if not jobs:
            self.since = None
        elif self.since is None:
            self.since = now

    def placed(self, now: float) -> None:
        """One of those that waited was given to a worker."""
        if self.since is not None:
            self.gaps.append(now - self.since)
            self.since = now

    def gap(self, now: float) -> float:
        """Seconds from one placement to the next while somebody waits; 0 = not measured."""
        total, count = sum(self.gaps), len(self.gaps)
        ongoing = now - self.since if self.since is not None else 0.0
        if count < ENOUGH and total + ongoing < WINDOW_S:
            return 0.0
        if ongoing * count > total or not count:  # what is going on says something only once it takes longer than usual
            return (total + ongoing) / (count + 1)
        return total / count

    def demand(self, now: float) -> float:
        """Jobs that came, a second."""
        self._forget(now)
        return len(self.came) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self.came and self.came[0] <= now - WINDOW_S:
            self.came.popleft()
