"""MessagePack on the data plane: one encoder, one decoder, the schema range rule.

Every message is a map with its `schema` version. A reader takes this version and the one before, ignores fields it does not
know, and refuses everything else whole: a message is never half-read. JSON (`encode_json`) is for what a person may type.
A writer uses the newest version that all live peers announce (`services.bus.dialect`).

1: the first. 2: a router says in its reports, and an edge in its beats, what versions may be written to it; fields only.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md, through msgspec, which checks types while it decodes.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from schemas.errors import UnreadableMessage, UnsupportedSchema
from schemas.numbers import Count

SCHEMA = 2
"""The newest version this code writes."""
OLDEST_SCHEMA = max(1, SCHEMA - 1)
"""The oldest version this code reads."""
READS = range(OLDEST_SCHEMA, SCHEMA + 1)


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of everything that is a whole NATS payload."""

    schema: int = msgspec.field(default_factory=lambda: SCHEMA)  # a factory, so that it is never omitted


class SchemaRange(msgspec.Struct, frozen=True, kw_only=True):
    """What a process reads. Version 1 did not always say so: nothing said means 1 alone."""

    oldest: Count = 1
    newest: Count = 1


def range_of(newest: int) -> SchemaRange:
    """What a build reads whose newest version is `newest`."""
    return SchemaRange(oldest=max(1, newest - 1), newest=newest)


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


def decode(data: bytes, kind: type[M], reads: range = READS) -> M:
    """`data` as a `kind` (a `Message` class or a union of tagged ones).

    Raises `UnsupportedSchema` for a version outside `reads`, `UnreadableMessage` for anything else that is wrong.
    """
    try:
        schema = _version.decode(data).schema
        if schema not in reads:
            raise UnsupportedSchema(f"schema {schema} is outside {reads.start}..{reads.stop - 1}")
        return cast("M", _decoder(cast("Hashable", kind)).decode(data))
    except _UNREADABLE as error:
        raise UnreadableMessage(f"not a {_name(kind)}: {error}") from None


def version_of(data: bytes) -> int | None:
    """The schema version of a message that may be unreadable otherwise. None: it has none."""
    try:
        return _version.decode(data).schema
    except _UNREADABLE:
        return None


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
