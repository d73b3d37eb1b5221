"""Which schema version this process writes: the highest that everybody it hears announces.

Owns what peers announced, and when. Must not know who may be a peer: whoever hears a beat says so. Invariants: a version that a
peer heard lately cannot read is not written; who has heard nobody yet, or not for long, writes the oldest version it knows.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from schemas.codec import SCHEMA, Message, SchemaRange, decode, encode, range_of, version_of
from schemas.errors import UnsupportedSchema
from services.clock import Clock

SETTLE_S = 2.0
"""Every router says its cards twice in that time, every edge and worker beats more often."""
FORGET_S = 10.0
"""A peer that has been silent for so long, the longest that a live one may be, is not waited for."""
DECIDE_S = 0.25

M = TypeVar("M")


class Dialect:
    """`newest`: the newest version this process speaks. Without a `clock` nobody has to be agreed with: it writes that."""

    def __init__(self, newest: int = SCHEMA, clock: Clock | None = None) -> None:
        self.own = range_of(newest)
        self._clock = clock
        self._reads = range(self.own.oldest, newest + 1)
        self._peers: dict[tuple[str, str], tuple[float, SchemaRange]] = {}
        self._newer_at = float("-inf")
        self._since = clock.monotonic() if clock is not None else float("-inf")
        self._writes, self._decided = (self.own.oldest, self._since) if clock is not None else (newest, float("inf"))

    # what is heard

    def hear(self, process: str, speaks: SchemaRange, about: str = "") -> None:
        """`process` announces this of itself, or of those it speaks `about`."""
        if self._clock is None:
            return
        key = (process, about)
        known = self._peers.get(key)
        self._peers[key] = (self._clock.monotonic(), speaks)
        if known is None or known[1] != speaks:
            self._decide()

    def gone(self, process: str) -> None:
        """It is dead, or left."""
        self._peers = {key: said for key, said in self._peers.items() if key[0] != process}

    def restart(self) -> None:
        """Our connection was down: who came meanwhile has not been heard."""
        if self._clock is not None:
            self._since = self._clock.monotonic()
            self._decide()

    # what is said

    @property
    def writes(self) -> int:
        """The version of the next message."""
        if self._clock is not None and self._clock.monotonic() - self._decided >= DECIDE_S:
            self._decide()
        return self._writes

    def encode(self, message: Message, version: int | None = None) -> bytes:
        """`message` as `version`, by default the one that all can read. Versions so far add fields, which older readers skip."""
        version = version or self.writes
        return encode(
            message if message.schema != SCHEMA or version == SCHEMA else msgspec.structs.replace(message, schema=version)
        )

    def decode(self, data: bytes, kind: type[M]) -> M:
        """Raises `UnreadableMessage`; `UnsupportedSchema` for what this process is too old for, or too new."""
        try:
            return decode(data, kind, self._reads)
        except UnsupportedSchema:
            if self._clock is not None and (version_of(data) or 0) > self.own.newest:
                self._newer_at = self._clock.monotonic()  # others are a version ahead, and read ours
                self._decide()
            raise

    def _decide(self) -> None:
        assert self._clock is not None
        now = self._decided = self._clock.monotonic()
        self._peers = {key: said for key, said in self._peers.items() if now - said[0] < FORGET_S}
        heard = [self.own, *(speaks for _, speaks in self._peers.values())]
        oldest = max(speaks.oldest for speaks in heard)
        newest = max(oldest, min(speaks.newest for speaks in heard))
        settled = len(heard) > 1 and now - self._since >= SETTLE_S
        self._writes = min(self.own.newest, newest if settled or now - self._newer_at < FORGET_S else oldest)
