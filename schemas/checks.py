"""What a field must be beyond its type. A message that comes from a peer is not trusted to be one of ours."""

from __future__ import annotations

import math
import re

from schemas.identity import is_process

_SUBJECT = re.compile(r"[A-Za-z0-9_$=-]+(\.[A-Za-z0-9_$=-]+)*\Z")


def require(holds: bool, text: str) -> None:
    """Raises ValueError, which the codec turns into an `UnreadableMessage`."""
    if not holds:
        raise ValueError(text)


def require_process(process: str, what: str) -> None:
    """Process ids become tokens of subjects."""
    require(is_process(process), f"{what} is not a process id")


def require_finite(**values: float | None) -> None:
    for name, value in values.items():
        require(value is None or math.isfinite(value), f"{name} is not a finite number")


def is_subject(text: str) -> bool:
    """A literal NATS subject of ours: tokens of letters, digits and `_$=-`, no wildcard, at most 256 characters."""
    return len(text) <= 256 and _SUBJECT.match(text) is not None
