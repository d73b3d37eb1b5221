"""How limits and lists of models lie in a row, and what becomes of a row that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from services.edge.gate.limits import NONE, Limits
from services.edge.gate.records import Unreadable

T = TypeVar("T")


def limits_text(limits: Limits) -> str:
    return msgspec.json.encode(limits).decode()


def limits_of(text: str | None) -> Limits:
    """Raises ValueError for limits that this build does not know, and so could not keep."""
    return NONE if text is None else msgspec.json.decode(text, type=Limits)


def models_text(models: frozenset[str] | None) -> str | None:
    return None if models is None else json.dumps(sorted(models))


def models_of(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(json.loads(text))


def readable(read: Callable[[Any], T], row: Any, name: str, changed: float) -> T | Unreadable:
    """`read(row)`, or what stands for a row that a newer build wrote: it must not hide the others."""
    try:
        return read(row)
    except (ValueError, TypeError):
        return Unreadable(name, changed)
