"""How deeply JSON values may lie in one another, so that what reads them may recurse without fear."""

from __future__ import annotations

from typing import Any

DEEPEST = 128
_HOLDERS = (dict, list)


def too_deep(value: Any) -> bool:
    """Whether containers lie in one another more than `DEEPEST` times. Looks level by level."""
    level = [value] if isinstance(value, _HOLDERS) else []
    for _ in range(DEEPEST):  # a million of values may lie here: no call for each
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, _HOLDERS)
        ]
        if not level:
            return False
    return True
