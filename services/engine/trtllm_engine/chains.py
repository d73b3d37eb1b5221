"""What recent requests may have left in the engine's cache: identities of their blocks, chain by chain.

Owns which chains are remembered. Knows no events. Invariant: what a chain begins with is forgotten last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.job import pack_ids
from services.kv.hashing import block_hashes

RECENT_BLOCKS = 2**17
"""Of recent requests' chains; 2 million tokens at 16 a block."""


@dataclass(frozen=True, slots=True)
class Link:
    """A block: the root of its chain, and its identity."""

    root: bytes
    identity: bytes


class Chains:
    """Identities of recent requests' blocks, the oldest forgotten first; and which chains begin with which ids."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: OrderedDict[bytes, bytes | None] = OrderedDict()
        """Identity to the packed ids of a chain's first block, None for the others."""
        self._first: dict[bytes, dict[bytes, Link]] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._known

    def add(self, root: bytes, ids: Sequence[int]) -> None:
        identities = block_hashes(ids, self._block_tokens, root)
        for identity in reversed(identities[1:]):
            self._note(identity, None)
        if identities:
            packed = pack_ids(ids[: self._block_tokens])
            self._first.setdefault(packed, {})[identities[0]] = Link(root, identities[0])
            self._note(identities[0], packed)  # last, so that a chain's beginning is forgotten last
        while len(self._known) > RECENT_BLOCKS:
            self._forget(*self._known.popitem(last=False))

    def beginning_with(self, packed: bytes) -> Iterator[Link]:
        return iter(tuple(self._first.get(packed, {}).values()))

    def _note(self, identity: bytes, packed: bytes | None) -> None:
        self._known[identity] = packed
        self._known.move_to_end(identity)

    def _forget(self, identity: bytes, packed: bytes | None) -> None:
        if packed is not None:
            del self._first[packed][identity]
            if not self._first[packed]:
                del self._first[packed]
