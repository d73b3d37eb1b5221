"""The prefix cache as the pool sees it: an index from identities of full blocks to blocks, and an order of eviction.

Owns: which indexed block goes first. Must not know: who holds a block, memory, engines. Invariant: `evict` names only
blocks that are indexed and not pinned. The pool alone calls everything but `match` and `drain_events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Identities that entered and left the index since the last drain, in order of time within each tuple."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class PrefixCache(Protocol):
    """What a prefix cache must do. It is called on the event loop and never blocks."""

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest indexed beginning of the chain `hashes`. The caller holds them before it awaits."""
        ...

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[bool]:
        """Offer full, pinned blocks by identity; True where the index took one. A known identity is not taken again."""
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

    def drain_events(self) -> CacheEvents:
        """What changed since the last call."""
        ...


class NullPrefixCache:
    """Takes nothing, so no block is ever cached."""

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        return []

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[bool]:
        return [False] * len(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        return None

    def unpin(self, blocks: Sequence[int]) -> None:
        return None

    def evict(self, n: int) -> list[int]:
        return []

    def drain_events(self) -> CacheEvents:
        return CacheEvents()
