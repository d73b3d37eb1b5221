"""What came into an index of KV blocks and what left it since somebody looked last.

Knows identities only. Invariant: what was stored and removed between two looks is not told, so what nobody drains is bounded by
the blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable

from services.kv.prefix import CacheEvents


class CacheChanges:
    """`hook`: called when the first change since the last look comes."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.hook: Callable[[], None] = _nothing

    def stored(self, identity: bytes) -> None:
        if not self._stored and not self._removed:
            self.hook()
        self._stored[identity] = None

    def removed(self, identity: bytes) -> None:
        if not self._stored and not self._removed:
            self.hook()
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._removed[identity] = None

    def drain(self) -> CacheEvents:
        events = CacheEvents(tuple(self._stored), tuple(key for key in self._removed if key not in self._stored))
        self._stored, self._removed = {}, {}
        return events


def _nothing() -> None:
    """Until somebody wants to know."""
