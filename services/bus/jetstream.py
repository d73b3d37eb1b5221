"""JetStream over the bus's own requests: three calls, each with a deadline, each failure one exception.

nats-py's JetStream client is not used: it truncates TTLs, hides what a time-out means, and brings its own deadlines.
Must not know which streams exist. Invariant: JetStream that is down or slow costs a caller its deadline, no more.
Source: the request subjects and bodies of nats-server's JetStream API (`$JS.API.*`), schema io.nats.jetstream.api.v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

from schemas.codec import decode_json
from schemas.errors import BusUnavailable, Disconnected, NobodyListens, NoResponders, RequestTimeout
from services.bus.interface import Bus, Msg

API = "$JS.API"
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_NAME_TAKEN = 10148
STREAM_NAME_TAKEN = 10058
MESSAGE_NOT_FOUND = 10037
SEQUENCE_NOT_FOUND = 10043
STORE_FAILED = 10077
NS = 1_000_000_000
Json = dict[str, Any]


class ApiError(Exception):
    """JetStream understood the request and said no. `err_code` is its stable number, `text` its words."""

    def __init__(self, err_code: int, text: str) -> None:
        super().__init__(f"{text} ({err_code})")
        self.err_code = err_code
        self.text = text


class JetStream:
    """What every stream, consumer and bucket needs of the server. `timeout`: seconds one call may take.

    `replicas`: servers of a cluster that keep each stream; a cluster with fewer refuses to make it.
    """

    def __init__(self, bus: Bus, *, timeout: float = 1.0, replicas: int = 1) -> None:
        self.bus = bus
        self.timeout = timeout
        self.replicas = replicas

    async def api(self, verb: str, body: Json | None = None) -> Json:
        """`$JS.API.<verb>`. Raises `ApiError`, `BusUnavailable`."""
        return _read(await self.request(f"{API}.{verb}", msgspec.json.encode(body) if body is not None else b""))

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> Json:
        """Publish into whichever stream captures `subject`. Raises `ApiError`, `BusUnavailable`, `MessageTooLarge`."""
        return _read(await self.request(subject, data, headers))

    async def request(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> Msg:
        """One answered request. Raises `NobodyListens`, and `BusUnavailable` when nobody answers in time."""
        try:
            return await self.bus.request(subject, data, timeout=self.timeout, headers=headers)
        except NoResponders as error:
            raise NobodyListens(f"JetStream: {error}") from error
        except (RequestTimeout, Disconnected) as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    async def ensure_stream(self, config: Json) -> None:
        """Create the stream, or bring an older configuration of it up to date. Raises `ApiError`, `BusUnavailable`."""
        name, config = config["name"], {**config, "num_replicas": self.replicas}
        try:
            await self.api(f"STREAM.CREATE.{name}", config)
        except ApiError as error:
            if error.err_code != STREAM_NAME_TAKEN:
                raise
            await self.api(f"STREAM.UPDATE.{name}", config)


def ttl_header(seconds: float) -> str:
    """`Nats-TTL`: whole seconds, at least one, rounded up: a job may live a moment longer, never shorter."""
    return str(max(1, ceil(seconds)))


def _read(msg: Msg) -> Json:
    answer: Json = decode_json(msg.data, dict)
    error = answer.get("error")
    if error is not None:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return answer
