"""How late the event loop of each process of a stack was: from the histogram it answers on `hr.admin.<role>.<id>.metrics`.

Beside it what Linux says of the loop's thread: how long it computed, and how long it could have and no core was free.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from bench.admin import metrics
from bench.stack import Stack

_BUCKET = re.compile(rb'headrace_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')
Counts = dict[float, float]
"""Samples at most that late, by seconds: cumulative, as Prometheus has them."""


@dataclass(frozen=True)
class Reading:
    """Of one process, so far. Seconds: at, and that its loop's thread computed and waited for a core."""

    counts: Counts
    at: float
    computing: float
    waiting: float


@dataclass(frozen=True)
class Lag:
    """Upper bounds in ms, as fine as the histogram's buckets; shares of the time: its thread computed, or lacked a core."""

    p50: float
    p99: float
    worst: float
    computing: float
    waiting: float


def lags(before: dict[str, Reading], after: dict[str, Reading]) -> dict[str, Lag]:
    """By process: of what was sampled between two readings."""
    found = {}
    for process in before.keys() & after.keys():
        first, last = before[process], after[process]
        counts = {bound: count - first.counts.get(bound, 0.0) for bound, count in last.counts.items()}
        p50, p99, worst = (1e3 * _quantile(counts, q) for q in (0.5, 0.99, 1.0))
        computing, waiting = last.computing - first.computing, last.waiting - first.waiting
        seconds = last.at - first.at
        found[process] = Lag(p50, p99, worst, computing / seconds, waiting / seconds)
    return dict(sorted(found.items()))


def read(stack: Stack) -> dict[str, Reading]:
    return {
        process: Reading(_counts(said), time.monotonic(), *_turns(stack.pids[process.split("-")[0]]))
        for process, said in metrics(stack).items()
    }


def _turns(pid: int) -> tuple[float, float]:
    """Of the first thread, which has the event loop."""
    computing, waiting, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(computing) / 1e9, int(waiting) / 1e9


def _quantile(counts: Counts, q: float) -> float:
    wanted = q * max(counts.values())
    return min(bound for bound, count in counts.items() if count >= wanted)


def _counts(said: bytes) -> Counts:
    return {float(bound): float(count) for bound, count in _BUCKET.findall(said)}
