"""Counters that many processes add to, each addition answered with the new value: one subject a counter, in stream `HR_COUNTERS`.

Owns the stream's configuration and the header. Must not know what is counted. A counter is forgotten `KEEP_S` after its last
addition. Source: NATS ADR-49, distributed counters (nats-server 2.12). Invariant: an addition is never made twice by us: one
whose answer was lost is not repeated.
"""

from __future__ import annotations

from schemas.errors import BusUnavailable, NoResponders
from schemas.subjects import COUNTERS_STREAM, Subjects
from services.bus.jetstream import NS, ApiError, JetStream

KEEP_S = 300


class Counters:
    """Every method raises `BusUnavailable` within `js.timeout` when JetStream cannot be reached."""

    def __init__(self, js: JetStream, subjects: Subjects) -> None:
        self._js = js
        self._subjects = subjects

    async def ensure(self) -> None:
        """Create the stream, or bring it up to date; repeating it is harmless."""
        config = {
            "name": COUNTERS_STREAM,
            "description": "Headrace: what edges have taken of each limit",
            "subjects": [self._subjects.counter("*", "*", "*")],
            "storage": "file",
            "allow_msg_counter": True,
            "max_msgs_per_subject": 1,
            "max_age": KEEP_S * NS,
        }
        try:
            await self._js.ensure_stream(config)
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    async def add(self, kind: str, owner: str, window: int, amount: int) -> int:
        """The counter's value with `amount` in it, which may be negative. Makes the stream when it is gone."""
        try:
            return await self._add(kind, owner, window, amount)
        except BusUnavailable as error:
            if not isinstance(error.__cause__, NoResponders):
                raise
            await self.ensure()
            return await self._add(kind, owner, window, amount)

    async def _add(self, kind: str, owner: str, window: int, amount: int) -> int:
        try:
            subject = self._subjects.counter(kind, owner, str(window))
            answer = await self._js.store(subject, b"", {"Nats-Incr": f"{amount:+d}"})
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error
        return int(answer["val"])
