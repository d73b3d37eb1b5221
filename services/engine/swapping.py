"""Moves the KV of a whole run out of the pool into its swap space, and back.

Owns: what is copied, into which blocks it comes back. Must not know: who goes, when, steps. Invariant: after the way back each
token's KV has the bytes it had; full blocks that choices shared they share again, what a choice writes next is its own, and its
next step can run. A generator copies one block a turn, so that the event loop waits for one copy at most; until it is through,
nobody may compute or end the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequences

from services.engine.blocks import SequenceBlocks
from services.engine.sequence import Sequence
from services.kv.pool import BlockPool

Run = Sequences[Sequence]
"""All sequences of one run."""


class Swapping:
    def __init__(self, pool: BlockPool, blocks: SequenceBlocks) -> None:
        self._pool = pool
        self._blocks = blocks

    def can_leave(self, run: Run) -> bool:
        """There is room for what it has computed, and the pool is large enough for it to come back."""
        shared = {block for sequence in run for block in sequence.blocks[: sequence.sealed]}
        computed = {block for sequence in run for block in self._computed(sequence)}
        return len(computed) <= self._pool.swap.free and len(shared) + _own(self._blocks, run) <= self._pool.total

    def out(self, run: Run, now: float) -> Iterator[None]:
        """Its blocks are released once all are copied."""
        slots = self._pool.swap.reserve({sequence.holder: self._computed(sequence) for sequence in run})
        return self._copy_out(run, slots, now)

    def price(self, run: Run) -> int:
        """How many of the available blocks a swapped run takes, to come back and compute."""
        slots = {slot for sequence in run for slot in self._full(sequence)}
        cached = {block for sequence in run for block in self._cached(sequence)}
        return len(slots) - self._pool.shared(cached) + _own(self._blocks, run)

    def back(self, run: Run) -> Iterator[None]:
        """Claims its blocks now: its `price` must be available."""
        placed: dict[int, int] = {}
        copies: list[tuple[int, int]] = []
        claimed = [self._claim(sequence, placed, copies) for sequence in run]
        return self._copy_back(run, claimed, copies)

    def _copy_out(self, run: Run, slots: dict[int, int], now: float) -> Iterator[None]:
        for block, slot in slots.items():
            self._pool.swap.put(slot, self._pool.read(block))
            yield
        for sequence in run:
            self._pool.vacate(sequence.holder)
            sequence.blocks, sequence.swapped_at = (), now

    def _copy_back(self, run: Run, claimed: list[tuple[int, ...]], copies: list[tuple[int, int]]) -> Iterator[None]:
        for slot, block in copies:
            self._pool.write(block, self._pool.swap.get(slot))
            yield
        for sequence, blocks in zip(run, claimed, strict=True):
            self._pool.swap.drop(sequence.holder)
            sequence.blocks, sequence.sealed = blocks, 0
            self._blocks.seal(sequence)  # all of it anew: the cache may have another block of the same content by now
            sequence.swapped_at, sequence.returned_at = None, sequence.computed

    def _claim(self, sequence: Sequence, placed: dict[int, int], copies: list[tuple[int, int]]) -> tuple[int, ...]:
        """The sequence's blocks: what is there already, then its own, which `copies` says how to fill.

        `placed`: where this run's full blocks are by now.
        """
        slots, cached = self._pool.swap.slots(sequence.holder), self._cached(sequence)
        there: list[int] = []
        for position, slot in enumerate(self._full(sequence)):
            if position < len(cached):
                placed.setdefault(slot, cached[position])
            if slot not in placed:
                break
            there.append(placed[slot])
        blocks = self._pool.claim(sequence.holder, self._blocks.wanted(sequence), there)
        for position in range(len(there), len(slots)):
            copies.append((slots[position], blocks[position]))
        placed.update(zip(self._full(sequence), blocks, strict=False))
        return blocks

    def _computed(self, sequence: Sequence) -> tuple[int, ...]:
        return sequence.blocks[: self._blocks.needed(sequence.computed)]

    def _full(self, sequence: Sequence) -> tuple[int, ...]:
        """The slots of what is never written again."""
        return self._pool.swap.slots(sequence.holder)[: sequence.sealed]

    def _cached(self, sequence: Sequence) -> list[int]:
        """Those of its full blocks that the prefix cache has: its own of old, or others of the same content."""
        return self._pool.prefix.match(sequence.hashes[: sequence.sealed])


def _own(blocks: SequenceBlocks, run: Run) -> int:
    """Blocks that each sequence has for itself: what it has filled in part, what it writes next."""
    return sum(blocks.wanted(sequence) - sequence.sealed for sequence in run)
