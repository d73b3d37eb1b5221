"""JSON as it is written to callers.

Invariant: no character in it ends a line for anybody. Some clients (httpx's `iter_lines`, whatever uses `str.splitlines`) end one
at U+0085, U+2028 and U+2029 too, which JSON may hold as they are and the rules of event streams do not count.
"""

from __future__ import annotations

from typing import Any

import msgspec

_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def encode(value: Any) -> bytes:
    """What is no ASCII stands within strings only, so there it can be spelled otherwise."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for end, spelled in _ENDS:
            data = data.replace(end, spelled)
    return data
