"""Figures of a bench as words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Row = tuple[str, str]
"""What was done, and what was measured."""


def percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return f"p50 {1000 * statistics.median(ordered):.0f} ms, p99 {1000 * high:.0f} ms ({len(ordered)} samples)"


def rounds_of(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s ({len(seconds)} rounds)"
