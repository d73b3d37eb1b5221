"""What is published of the engine's cache: identities under small numbers, and what changed since it was asked for last.

Knows neither events nor requests. Invariant: what was stored and removed between two looks is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from services.kv.prefix import CacheEvents


class Published:
    """`hook`: called when the first change since the last look comes."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._free: list[int] = []
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.hook: Callable[[], None] = _nothing

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._numbers

    def put(self, identity: bytes) -> None:
        number = self._free.pop() if self._free else len(self._numbers)
        self._numbers[identity], self._names[number] = number, identity
        self._announce()
        self._stored[identity] = None

    def drop(self, identity: bytes) -> None:
        number = self._numbers.pop(identity)
        del self._names[number]
        self._free.append(number)
        self._announce()
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._removed[identity] = None

    def clear(self) -> None:
        for identity in list(self._numbers):
            self.drop(identity)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for identity in hashes:
            if identity not in self._numbers:
                break
            found.append(self._numbers[identity])
        return found

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return [self._names[block] for block in blocks if block in self._names]

    def drain(self) -> CacheEvents:
        events = CacheEvents(tuple(self._stored), tuple(key for key in self._removed if key not in self._stored))
        self._stored, self._removed = {}, {}
        return events

    def _announce(self) -> None:
        if not self._stored and not self._removed:
            self.hook()


def _nothing() -> None:
    """Until somebody wants to know."""
