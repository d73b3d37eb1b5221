"""A message's headers to and from the bytes of HPUB and HMSG.

nats-py's reading of them is not used: it takes ` Name :` for `Name`, and some blocks end its reading for good, so anybody whose
messages reach us could speak in the server's name or make us deaf. Invariants: every block of bytes has a reading; a name is what
stands before the colon, to the byte; of equal names the last counts, which is where the server writes its own.
Source: NATS ADR-4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from services.bus.matching import breaks_framing

STATUS, DESCRIPTION = "Status", "Description"
_VERSION = b"NATS/1.0"
_LINE_END = b"\r\n"
_is_name = re.compile(rb"[\x21-\x7e]+").fullmatch


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The header block of HPUB. Raises ValueError for what would break the framing."""
    lines = [_VERSION + _LINE_END]
    for key, value in headers.items():
        if not key or ":" in key or breaks_framing(key) or "\r" in value or "\n" in value:
            raise ValueError(f"not a header: {key!r}")
        lines.append(f"{key}: {value}\r\n".encode())
    lines.append(_LINE_END)
    return b"".join(lines)


def decode_headers(block: bytes) -> dict[str, str]:
    """By name; what is no header is left out. A status in the first line comes as `Status` and, with a text, `Description`."""
    first, *lines = block.split(_LINE_END)
    headers: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION).strip().partition(b" ")
    if status.isdigit():
        headers[STATUS] = status.decode()
        if description:
            headers[DESCRIPTION] = _text(description)
    for line in lines:
        name, _, value = line.partition(b":")
        if _is_name(name):
            headers[name.decode()] = _text(value)
    return headers


def _text(value: bytes) -> str:
    return value.strip().decode("utf-8", "replace")
