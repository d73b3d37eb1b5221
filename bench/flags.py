"""Values that benches take from the command line: what no bench can run with is refused there, in a line that names the flag."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def above_zero(text: str) -> float:
    """A finite number above 0, for `type=` of argparse."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def from_zero(text: str) -> float:
    """The same, or 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """A whole number between these two, for `type=` of argparse."""

    def parse(text: str) -> int:
        value = _number(text)
        if not least <= value <= most or value % 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(value)

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
