"""Identities of prompts' blocks, and of which beginnings they were computed lately.

Owns: that memory, and no truth: an identity is a function of root and tokens alone, so what is remembered is never stale, and
what was forgotten is hashed again. Must not know: who has a block. Invariant: at most `most` segments are remembered, those that
were asked for last.

Hashing is most of what a decision with a long hit costs, and prompts with a long hit are those whose beginnings were hashed
before: of a conversation's turns, of requests with one system prompt. A segment is found again in the time of about one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.kv.hashing import chain

SEGMENT = 16
"""Blocks that are remembered together."""
MOST = 8192
"""Segments: 2 KB each with blocks of 16 tokens, so 2 million tokens in 17 MB."""


class Chains:
    def __init__(self, most: int = MOST) -> None:
        self._half = most // 2
        self._young: dict[bytes, tuple[bytes, ...]] = {}
        self._old: dict[bytes, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        """Segments."""
        return len(self._young) + len(self._old)

    def names(self, packed: bytes, block_tokens: int, root: bytes) -> Iterator[Sequence[bytes]]:
        """Of the full blocks of `packed` (ids as u32, little-endian) after `root`, first to last: those of a segment at once when
        it is remembered, else one by one, so that who asks for no more has no more hashed.
        """
        size, start, parent = SEGMENT * 4 * block_tokens, 0, root
        while (names := self._recall(parent + packed[start : start + size])) is not None:
            yield names
            start, parent = start + size, names[-1]
        made: list[bytes] = []
        for name in chain(packed, block_tokens, root, parent, start):
            yield (name,)
            made.append(name)
            if len(made) == SEGMENT:
                self._remember(parent + packed[start : start + size], tuple(made))
                start, parent, made = start + size, name, []

    def _recall(self, key: bytes) -> tuple[bytes, ...] | None:
        names = self._young.get(key)
        if names is None and (names := self._old.get(key)) is not None:
            self._remember(key, names)
        return names

    def _remember(self, key: bytes, names: tuple[bytes, ...]) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = names
