"""How late the event loop of each process of a stack was: from the histogram it answers on `hr.admin.<role>.<id>.metrics`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.admin import metrics
from bench.stack import Stack

_BUCKET = re.compile(rb'headrace_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')
Counts = dict[float, float]
"""Samples at most that late, by seconds: cumulative, as Prometheus has them."""


@dataclass(frozen=True)
class Lag:
    """Upper bounds in ms, as fine as the histogram's buckets."""

    p50: float
    p99: float
    worst: float


def lags(before: dict[str, Counts], after: dict[str, Counts]) -> dict[str, Lag]:
    """By process: of what was sampled between two readings."""
    found = {}
    for process in before.keys() & after.keys():
        counts = {bound: count - before[process].get(bound, 0.0) for bound, count in after[process].items()}
        found[process] = Lag(*(1e3 * _quantile(counts, q) for q in (0.5, 0.99, 1.0)))
    return dict(sorted(found.items()))


def read(stack: Stack) -> dict[str, Counts]:
    return {process: _counts(said) for process, said in metrics(stack).items()}


def _quantile(counts: Counts, q: float) -> float:
    wanted = q * max(counts.values())
    return min(bound for bound, count in counts.items() if count >= wanted)


def _counts(said: bytes) -> Counts:
    return {float(bound): float(count) for bound, count in _BUCKET.findall(said)}
