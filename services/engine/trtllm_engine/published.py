"""What is published of the engine's cache: identities under small numbers, and what changed since it was asked for last.

Knows neither events nor requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.kv.cache_changes import CacheChanges


class Published:
    """`changes`: what came and went."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._free: list[int] = []
        self.changes = CacheChanges()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._numbers

    def put(self, identity: bytes) -> None:
        number = self._free.pop() if self._free else len(self._numbers)
        self._numbers[identity], self._names[number] = number, identity
        self.changes.stored(identity)

    def drop(self, identity: bytes) -> None:
        number = self._numbers.pop(identity)
        del self._names[number]
        self._free.append(number)
        self.changes.removed(identity)

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
