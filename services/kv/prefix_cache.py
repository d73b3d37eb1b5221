"""The prefix cache: full KV blocks by identity, the least recently used one evicted first.

Owns: the index and the order of eviction. Must not know: who holds a block, tokens, memory. Invariant: an identity names one
block and a block has one identity; a block is idle (evictable) exactly when it is indexed and nobody holds it.

Children go before parents without a pointer between them. A chain is held from its beginning, and a holder that computed a block
the index has already is given the indexed one (`BlockLedger.seal`); so whoever holds a block holds the indexed blocks before it,
too, and as a holder lets go of its chain's end first, a parent becomes idle after its child.

Every operation costs O(1) a block. Measured on CPython 3.11: a million cached blocks (16 million tokens) take 270 MB, of which
the identities are 60, the index 90 and the order of eviction 120.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from services.kv.cache_changes import CacheChanges
from services.kv.prefix import CacheEvents, NullPrefixCache, PrefixCache


def prefix_cache(*, enabled: bool) -> PrefixCache:
    """The cache of a worker that wants one, or one that keeps nothing."""
    return LruPrefixCache() if enabled else NullPrefixCache()


class LruPrefixCache:
    """A `PrefixCache`."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # not a dict: that takes ever longer to find its first key
        self._changes = CacheChanges()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for key in hashes:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int | None]:
        kept: list[int | None] = []
        for key, block in zip(hashes, blocks, strict=True):
            known = self._blocks.setdefault(key, block)
            if known == block:
                self._names[block] = key
                self._changes.stored(key)
            kept.append(known)
        return kept

    def pin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._idle[block]

    def unpin(self, blocks: Sequence[int]) -> None:
        self._idle.update(dict.fromkeys(blocks))

    def evict(self, n: int) -> list[int]:
        victims = [self._idle.popitem(last=False)[0] for _ in range(min(n, len(self._idle)))]
        for block in victims:
            key = self._names.pop(block)
            del self._blocks[key]
            self._changes.removed(key)
        return victims

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return [self._names[block] for block in blocks if block in self._names]

    def drain_events(self) -> CacheEvents:
        return self._changes.drain()

    def on_change(self, hook: Callable[[], None]) -> None:
        self._changes.hook = hook
