"""Counters that many processes add to, each addition answered with the new value: one subject a counter, in stream `HR_COUNTERS`.

Owns the stream's configuration and the header. Must not know what is counted. A counter is forgotten `KEEP_S` after its last
addition. Source: NATS ADR-49, distributed counters (nats-server 2.12). Invariants: an addition is never made twice by us: one
whose answer was lost is not repeated; counters that were lost are noticed, by the stream's sequence, which only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import BusUnavailable, NobodyListens
from schemas.subjects import COUNTERS_STREAM, Subjects
from services.bus.jetstream import NS, ApiError, JetStream

KEEP_S = 300


@dataclass(frozen=True, slots=True)
class Count:
    """A counter's `value` now. `era`: 0 until this process sees, in the counter's window, that all counters were lost and began
    anew; another number each time it does."""

    value: int
    era: int = 0


class Counters:
    """Every method raises `BusUnavailable` within `js.timeout` when JetStream cannot be reached.

    Windows are numbered alike for all counters, and the numbers grow.
    """

    def __init__(self, js: JetStream, subjects: Subjects) -> None:
        self._js = js
        self._subjects = subjects
        self._newest = 0
        self._era = 0
        self._window = self._lost_in = -1

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

    async def add(self, kind: str, owner: str, window: int, amount: int) -> Count:
        """The counter with `amount` in it, which may be negative. Makes the stream when it is gone."""
        try:
            return await self._add(kind, owner, window, amount)
        except NobodyListens:
            await self.ensure()
            return await self._add(kind, owner, window, amount)

    async def _add(self, kind: str, owner: str, window: int, amount: int) -> Count:
        before = self._newest
        self._window = max(self._window, window)
        try:
            subject = self._subjects.counter(kind, owner, str(window))
            answer = await self._js.store(subject, b"", {"Nats-Incr": f"{amount:+d}"})
        except ApiError as error:
            raise BusUnavailable(f"JetStream: {error}") from error
        return Count(int(answer["val"]), self._era_of(window, int(answer["seq"]), before))

    def _era_of(self, window: int, sequence: int, before: int) -> int:
        """Of an addition that was asked for after the one with sequence `before` was made."""
        if sequence <= min(before, self._newest):
            self._era, self._newest, self._lost_in = self._era + 1, sequence, self._window
        self._newest = max(self._newest, sequence)
        return self._era if window <= self._lost_in else 0
