"""What engines make of the steps they measure: an exponential average, and the p99 of recent ones."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 512
"""Steps of which the p99 is taken."""
_WEIGHT = 0.1


def average(old: float, new: float) -> float:
    """`old` moved a tenth of the way to `new`; 0 = nothing was measured before."""
    return new if old == 0.0 else (1 - _WEIGHT) * old + _WEIGHT * new


def p99(ordered: Sequence[float]) -> float:
    """Of sorted values; 0 without any."""
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
