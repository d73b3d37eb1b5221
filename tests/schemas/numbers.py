"""Messages in which one number is another one: what a peer that is broken, or means harm, may send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from schemas.codec import Message, encode

Path = tuple[Any, ...]
"""Keys and positions, from the outside in."""
EXTREMES = (
    *(-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1),
    *(float("nan"), float("inf"), float("-inf"), -1e308, -1.0, 5e-324, 1e-300, 1e10, 1e300, 1e308),
)
"""What arithmetic, array indices, SQL columns and timers do not take, or only just do."""


def numbers(message: Message) -> list[Path]:
    """Where the numbers of `message` stand, keys of maps left out."""
    return [path for path, _ in _leaves(msgspec.msgpack.decode(encode(message)), ())]


def with_number(message: Message, path: Path, number: float) -> bytes:
    """`message` on the wire, with `number` at `path`."""
    content = msgspec.msgpack.decode(encode(message))
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = number
    return msgspec.msgpack.encode(content)


def floats(message: Message) -> list[float]:
    return [value for _, value in _leaves(msgspec.msgpack.decode(encode(message)), ()) if isinstance(value, float)]


def _leaves(content: Any, path: Path) -> Iterator[tuple[Path, float]]:
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for step, inner in steps:
        if isinstance(inner, int | float) and not isinstance(inner, bool):
            yield (*path, step), inner
        else:
            yield from _leaves(inner, (*path, step))
