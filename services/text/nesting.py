"""How deeply JSON values may lie in one another, so that what reads them may recurse without fear."""

from __future__ import annotations

from typing import Any

DEEPEST = 128


def too_deep(value: Any) -> bool:
    """Whether containers lie in one another more than `DEEPEST` times. Looks level by level."""
    level = [value] if _holds(value) else []
    for _ in range(DEEPEST):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item) if _holds(inner)]
        if not level:
            return False
    return True


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)
