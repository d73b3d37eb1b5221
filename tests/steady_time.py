"""Time that passes only while this process runs. On a machine that others share it may stand still for seconds; for the services
that a test runs in its own process that is no silence, no lost answer and no expired lease.

Owns `time.monotonic` of the process that the tests run in; event loops and `SystemClock` read it. Other processes, uvloop and
Unix time know nothing of it. Invariants: it never goes back, and never runs ahead of the real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.01
GAP_S = 0.02
"""Whoever ticks each 10 ms and is this late was not let run, and with it nobody of this process. Several such gaps in a row are
longer than what some tests give an answer."""


class SteadyTime:
    """Seconds since it was made, less those in which the process stood still. A thread of its own ticks, and so finds them."""

    def __init__(self) -> None:
        self._real = time.monotonic
        self._last = self._real()
        self._stood = 0.0
        self._lock = threading.RLock()  # a signal handler may ask while its thread does
        self._stop = threading.Event()

    def monotonic(self) -> float:
        with self._lock:
            now = self._real()
            if now - self._last > GAP_S:
                self._stood += now - self._last - TICK_S
            self._last = now
            return now - self._stood

    def run(self) -> None:
        while not self._stop.wait(TICK_S):
            self.monotonic()

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def steady_time() -> Iterator[None]:
    """`time.monotonic` is steady inside."""
    real, steady = time.monotonic, SteadyTime()
    ticking = threading.Thread(target=steady.run, name="steady time", daemon=True)
    ticking.start()
    time.monotonic = steady.monotonic
    try:
        yield
    finally:
        time.monotonic = real
        steady.stop()
        ticking.join()
