"""The prefix cache as the pool sees it: an index from identities of full blocks to blocks, and an order of eviction.

Owns: which indexed block goes first. Must not know: who holds a block, memory, engines. Invariant: `evict` names only
blocks that are indexed and not pinned. The pool alone calls everything but `match`, `identities`, `drain_events` and `on_change`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What happened to the index since the last drain, each part in order of time. No identity is in both.

    `stored`: what came and is there, also when it had been there before (it may lie in another block now); `removed`: what
    was there and is not.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class PrefixCache(Protocol):
    """What a prefix cache must do. It is called on the event loop and never blocks."""

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest indexed beginning of the chain `hashes`. The caller holds them before it awaits."""
        ...

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int | None]:
        """Offer full, pinned blocks that are not indexed; for each, the block that the index has of this identity now.

        That is the one offered, or an older one, which stays; None where nothing is kept.
        """
        ...

    def pin(self, blocks: Sequence[int]) -> None:
        """These indexed blocks got their first holder: they are not evicted."""
        ...

    def unpin(self, blocks: Sequence[int]) -> None:
        """These indexed blocks lost their last holder, the least useful (the chain's end) first."""
        ...

    def evict(self, n: int) -> list[int]:
        """Drop `n` indexed blocks that are not pinned (all of them, if fewer) and name them."""
        ...

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        """The identities of those of `blocks` that are indexed."""
        ...

    def drain_events(self) -> CacheEvents:
        """What changed since the last call."""
        ...

    def on_change(self, hook: Callable[[], None]) -> None:
        """Call `hook` when the first change after a drain happens. One hook at most."""
        ...


class NullPrefixCache:
    """Takes nothing, so no block is ever cached."""

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        return []

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int | None]:
        return [None] * len(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        return None

    def unpin(self, blocks: Sequence[int]) -> None:
        return None

    def evict(self, n: int) -> list[int]:
        return []

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return []

    def drain_events(self) -> CacheEvents:
        return CacheEvents()

    def on_change(self, hook: Callable[[], None]) -> None:
        return None
