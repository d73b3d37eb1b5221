"""Time as a value that is passed in: the real one, and one that a test moves by hand."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """`monotonic()` measures spans, `wall()` is Unix time for what crosses a process boundary; both in seconds."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """Stands still until `advance` is called."""

    now: float = 1_000.0
    epoch: float = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.epoch + self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True)
class LoopClock:
    """The time of the running event loop, which a simulation may have made; `epoch` and `drift` (s/s) are a process's error."""

    loop: asyncio.AbstractEventLoop
    epoch: float = 1_700_000_000.0
    drift: float = 0.0

    def monotonic(self) -> float:
        return self.loop.time()

    def wall(self) -> float:
        return self.epoch + self.loop.time() * (1.0 + self.drift)
