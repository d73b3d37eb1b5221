"""The keys that an edge knows: all that were shown to it lately, kept up with the database.

Owns the cache. Invariants: a key that is revoked anywhere is refused here within `REFRESH_S` and the time of one query; a key
that is not known here is looked up once, not on every request; without the database the known keys go on, and an unknown one
is neither accepted nor called wrong, and so is one whose row this build cannot read. Such a row hides no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol, TypeVar

from schemas.errors import InvalidApiKey, StoreUnavailable
from services.clock import Clock
from services.edge.gate.keys import DIGEST_BYTES, digest, key_id, same
from services.edge.gate.records import KeyRecord, Unreadable
from services.telemetry.logs import AtMost

REFRESH_S = 2.0
_OVERLAP_S = 10.0
"""A change is looked for again this long after its time: its transaction may have ended later than a newer one's."""
_MOST_KNOWN = 100_000
_MOST_UNKNOWN = 10_000
_UNKNOWN_S = 2.0
_log = logging.getLogger("headrace.edge")
V = TypeVar("V")


class KeyStore(Protocol):
    """Both raise `StoreUnavailable`; `get` also for a row that cannot be read."""

    async def get(self, key: str) -> KeyRecord | None: ...

    async def changed_since(self, when: float) -> list[KeyRecord | Unreadable]: ...


class Keyring:
    """`secret`: the server's."""

    def __init__(self, store: KeyStore, secret: bytes, clock: Clock) -> None:
        self._store = store
        self._secret = secret
        self._clock = clock
        self._known: OrderedDict[str, KeyRecord] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._seen = 0.0
        self._may_log = AtMost(clock.monotonic, 10.0)

    async def check(self, text: str) -> KeyRecord:
        """The record of the key `text`. Raises `InvalidApiKey`, `StoreUnavailable`."""
        key = key_id(text)
        record = await self._find(key) if key is not None else None
        stored = record.digest if record is not None else bytes(DIGEST_BYTES)
        if not same(stored, digest(self._secret, text)) or record is None or not record.valid(self._clock.wall()):
            raise InvalidApiKey("The API key is not valid.")
        return record

    async def run(self) -> None:
        """Keep up, until cancelled: no failure ends it, or no later revocation would be seen."""
        while True:
            try:
                self._take(await self._store.changed_since(self._seen - _OVERLAP_S))
            except StoreUnavailable:
                if self._may_log() is not None:
                    _log.warning("the keys cannot be read; those that are known go on")
            except Exception:
                if self._may_log() is not None:
                    _log.exception("the keys were not read; it is tried again")
            await asyncio.sleep(REFRESH_S)

    async def _find(self, key: str) -> KeyRecord | None:
        record = self._known.get(key)
        if record is not None:
            self._known.move_to_end(key)
            return record
        now = self._clock.monotonic()
        if self._unknown.get(key, now) > now:
            return None
        found = await self._store.get(key)
        if found is None:
            self._unknown[key] = now + _UNKNOWN_S
            _shorten(self._unknown, _MOST_UNKNOWN)
            return None
        self._known[key] = found
        _shorten(self._known, _MOST_KNOWN)
        return found

    def _take(self, changed: Iterable[KeyRecord | Unreadable]) -> None:
        for record in changed:
            self._seen = max(self._seen, record.changed)
            self._unknown.pop(record.id, None)
            if isinstance(record, Unreadable):
                self._known.pop(record.id, None)
            elif record.id in self._known:
                self._known[record.id] = record


def _shorten(items: OrderedDict[str, V], most: int) -> None:
    while len(items) > most:
        items.popitem(last=False)
