"""What one argument's text stands for. Raises `argparse.ArgumentTypeError`, which names it and what it should be."""

from __future__ import annotations

import argparse
from typing import TypeVar

from schemas.job import Tier
from schemas.state import Role

_LONGEST_S = 36_525 * 86_400
Choice = TypeVar("Choice", Tier, Role)


def processes(text: str) -> int:
    return _number(text, 0, 256)


def port(text: str) -> int:
    return _number(text, 0, 65535)


def limit(text: str) -> int:
    return _number(text, 1, 10**15)  # sums of such numbers fit into any database


def duration(text: str) -> float:
    """`90s`, `30m`, `12h` or `7d` in seconds."""
    amount, unit = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if unit is None or not amount.isdecimal() or len(amount) > 10 or int(amount) * unit > _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no duration such as 90s, 30m, 12h or 7d, a century at most")
    return float(int(amount) * unit)


def tier(text: str) -> Tier:
    return _one_of(Tier, text)


def role(text: str) -> Role:
    return _one_of(Role, text)


def _one_of(kind: type[Choice], text: str) -> Choice:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(kind)}") from None


def _number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from {least} to {most}")
    return int(text)
