"""A request's body as a JSON object: read within bounds, decoded strictly.

UTF-8 without a byte order mark only; NaN, Infinity, numbers out of range, lone surrogates and nesting without end are refused by
the decoder, keys that stand twice in an object after it: readers differ on which one counts. Invariants: memory stays within
`max_body_bytes`, and the time that the event loop is held within what `bulk` allows, whatever is sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from schemas.errors import PayloadTooLarge, UnsupportedMediaType
from services.edge.api.bulk import MOST_PARTS, MOST_VALUES, too_many
from services.edge.api.errors import BadRequest
from services.settings.edge import EdgeSettings
from services.text.nesting import too_deep


async def read_json(request: Request, settings: EdgeSettings) -> dict[str, Any]:
    """The body as an object. Raises `BadRequest`, `PayloadTooLarge`, `UnsupportedMediaType`."""
    headers: Mapping[bytes, bytes] = dict(request.scope["headers"])
    _check_type(headers.get(b"content-type"))
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaType("The body must not be compressed.")
    return parse(await _read(headers, request.receive, settings.max_body_bytes, settings.body_deadline_s))


def parse(body: bytes) -> dict[str, Any]:
    """Raises `BadRequest`."""
    if not body:
        raise BadRequest("The request has no body; a JSON object is expected.")
    if too_many(body):
        text = f"The body holds more than {MOST_PARTS} objects, arrays and strings, or more than {MOST_VALUES} values."
        raise BadRequest(text)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body is not a JSON object.")
    if too_deep(value):
        raise BadRequest("The body is nested too deeply.")
    json.loads(body, object_pairs_hook=_refuse_duplicates)
    return value


def _refuse_duplicates(members: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in members:
        if key in seen:
            raise BadRequest(f"The body has the key {key[:64]!r} twice in one object.")
        seen.add(key)


def _check_type(value: bytes | None) -> None:
    if value is None:
        return
    kind, *parameters = (part.strip().lower() for part in value.split(b";"))
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise UnsupportedMediaType("Content-Type must be application/json.")
    charsets = [part.partition(b"=")[2].strip(b'"') for part in parameters if part.startswith(b"charset=")]
    if any(charset not in (b"utf-8", b"utf8") for charset in charsets):
        raise UnsupportedMediaType("The body must be UTF-8.")


async def _read(headers: Mapping[bytes, bytes], receive: Receive, limit: int, timeout: float) -> bytes:
    too_large = PayloadTooLarge(f"The body is larger than {limit} bytes.")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18 or int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise BadRequest("The body ended before it was whole.")  # who only stopped sending reads that
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BadRequest("The body did not arrive in time.") from None
