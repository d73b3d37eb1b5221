"""Which runs have their KV in the pool and can compute; who gives it up when the pool is full, and who comes back.

Called between steps. Must not know steps, bytes. The rules, over runs in order of precedence (tier, then arrival):

- A run that cannot grow preempts the last run of all, itself at worst: to the swap space, when it fits there and has computed
  something since it last came back; else it ends as RETRY.
- Swapped runs come back in order of precedence, as soon as there are blocks for what they have and, while others compute, one
  more for each sequence: so nobody is preempted anew before blocks were filled with tokens.
- What they wait for is withheld from runs that come after them and from all that arrive.
- A run that waited for `LONGEST_S` ends as RETRY, so its edge takes it elsewhere.

Invariant: no livelock. The first run of all is never preempted for another one, and between two times that a run is swapped it
computes at least one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.lifecycle import State
from services.clock import Clock
from services.engine.blocks import SequenceBlocks
from services.engine.live import LiveRuns
from services.engine.scheduler import choose_victim, precedence
from services.engine.sequence import Sequence
from services.engine.swapping import Swapping
from services.kv.pool import BlockPool, PoolExhausted

LONGEST_S = 2.0
"""Digests of a swapped run say its state as before and no progress: whoever supervises progress must allow for this long."""
PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Move:
    """A run's KV on its way; it is there when `copies` is through. Until then nobody may compute or end its sequences."""

    sequences: tuple[Sequence, ...]
    copies: Iterator[None]


class Residency:
    """Of one engine."""

    def __init__(self, pool: BlockPool, runs: LiveRuns, blocks: SequenceBlocks, clock: Clock) -> None:
        self._pool = pool
        self._runs = runs
        self._blocks = blocks
        self._clock = clock
        self._swapping = Swapping(pool, blocks)
        self._preemptions = 0

    def resident(self) -> list[Sequence]:
        """What may compute, in order of arrival."""
        return [sequence for sequence in self._runs.sequences() if sequence.swapped_at is None]

    def swapped(self) -> list[list[Sequence]]:
        """The runs that wait outside the pool."""
        return [run for run in self._runs.runs() if run[0].swapped_at is not None]

    def take_preemptions(self) -> int:
        """How many runs gave up their blocks since the last call."""
        taken, self._preemptions = self._preemptions, 0
        return taken

    def settle(self) -> Move | None:
        """Makes room for the next step of each resident run. A move that this needs is returned, and must be made first.

        None: whoever is resident now can compute.
        """
        self._pool.withheld = 0
        wanting = {s.run for s in self._runs.sequences() if s.swapped_at is not None or self._blocks.may_lack(s)}
        if not wanting:
            return None
        move = None
        for run in sorted(map(self._runs.of, wanting), key=lambda run: precedence(run[0])):
            move = self._make_room(run) if run[0].swapped_at is None else self._bring_back(run)
            if move is not None:
                break
        self._pool.withheld = sum(map(self._wish, self.swapped()))
        return move

    def _make_room(self, run: list[Sequence]) -> Move | None:
        for sequence in run:
            while self._runs.computes(sequence):
                try:
                    self._blocks.grow(sequence)
                    break
                except PoolExhausted:
                    move = self._preempt(self._runs.of(choose_victim(self.resident()).run))
                    if move is not None:
                        return move
        return None

    def _preempt(self, run: list[Sequence]) -> Move | None:
        """None: it ended."""
        self._preemptions += 1
        progressed = any(sequence.computed != sequence.returned_at for sequence in run)
        if progressed and self._swapping.can_leave(run):
            return Move(tuple(run), self._swapping.out(run, self._clock.monotonic()))
        self._runs.end(run[0].run, State.RETRY, PREEMPTED)
        return None

    def _bring_back(self, run: list[Sequence]) -> Move | None:
        if self._clock.monotonic() - (run[0].swapped_at or 0.0) >= LONGEST_S:
            self._runs.end(run[0].run, State.RETRY, PREEMPTED)
            return None
        wish, in_order = self._wish(run), self._pool.withheld == 0
        if in_order and wish <= self._pool.available:
            return Move(tuple(run), self._swapping.back(run))
        self._pool.withheld += wish
        return None

    def _wish(self, run: list[Sequence]) -> int:
        """Blocks that must be available before a swapped run comes back."""
        beside = len(self.resident())
        return self._swapping.price(run) + (beside + len(run) if beside else 0)
