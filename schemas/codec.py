"""MessagePack on the data plane: one encoder, one decoder, the schema range rule.

Every message is a map with its `schema` version. A reader takes this version and the one before, ignores fields it does not
know, and refuses everything else whole: a message is never half-read. JSON (`encode_json`) is for what a person may type.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md, through msgspec, which checks types while it decodes.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from schemas.errors import UnreadableMessage, UnsupportedSchema

SCHEMA = 1
"""The version this code writes."""
OLDEST_SCHEMA = max(1, SCHEMA - 1)
"""The oldest version this code reads."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of everything that is a whole NATS payload."""

    schema: int = msgspec.field(default_factory=lambda: SCHEMA)  # a factory, so that it is never omitted


class _Version(msgspec.Struct):
    schema: int


M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_version = msgspec.msgpack.Decoder(_Version)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@cache
def _decoder(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: msgspec.Struct) -> bytes:
    """The MessagePack form of `message`."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """`data` as a `kind` (a `Message` class or a union of tagged ones).

    Raises `UnsupportedSchema` for a version outside the range, `UnreadableMessage` for anything else that is wrong.
    """
    try:
        schema = _version.decode(data).schema
        if not OLDEST_SCHEMA <= schema <= SCHEMA:
            raise UnsupportedSchema(f"schema {schema} is outside {OLDEST_SCHEMA}..{SCHEMA}")
        return cast("M", _decoder(cast("Hashable", kind)).decode(data))
    except _UNREADABLE as error:
        raise UnreadableMessage(f"not a {_name(kind)}: {error}") from None


def encode_json(message: object) -> bytes:
    """The JSON form, for subjects a person types."""
    return msgspec.json.encode(message)


def decode_json(data: bytes, kind: type[M]) -> M:
    """`data` as a `kind`. Raises `UnreadableMessage`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except _UNREADABLE as error:
        raise UnreadableMessage(f"not a {_name(kind)}: {error}") from None


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))
