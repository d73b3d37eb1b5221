"""A message in words, for whoever reads the log of a failing seed."""

from __future__ import annotations

import msgspec

from services.bus.interface import Msg

_DULL = {
    "schema",
    "prompt",
    "sampling",
    "capabilities",
    "reply_to",
    "salt",
    "weights",
    "schemas",
    "rates",
    "kv_compat",
    "compute_s",
}


def words(msg: Msg) -> str:
    if msg.no_responders:
        return "NOBODY LISTENS"
    try:
        return _short(msgspec.msgpack.decode(msg.data))
    except msgspec.DecodeError:
        return f"{len(msg.data)} bytes"


def _short(value: object) -> str:
    match value:
        case dict():
            return "{" + " ".join(f"{key}={_short(inner)}" for key, inner in value.items() if key not in _DULL) + "}"
        case list():
            return "[" + " ".join(map(_short, value)) + "]"
        case str() if len(value) == 32:
            return value[:6]
        case int() if value > 1 << 40:
            return f"{value:x}"[:6]
        case float():
            return f"{value:.3f}"
    return str(value)
