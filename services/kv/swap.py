"""Room for the contents of KV blocks outside the pool, in this process's own memory: where preempted runs wait.

Owns: what is saved, for whom, and how much of it there may be. Must not know: where blocks lie, who is preempted and why.
Invariant (`check_integrity`): each saved content counts as many references as holders that name it, and there are never more than
`total`. What the last holder lets go of is freed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.kv.holders import Holder
from services.kv.ledger import LedgerError


class SwapSpace:
    """Contents of up to `total` blocks; 0 = there is none. Memory is taken when something is saved."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._next = 0
        self._contents: dict[int, bytes] = {}
        self._references: dict[int, int] = {}
        self._saved: dict[Holder, tuple[int, ...]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._saved

    @property
    def used(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._saved)

    def reserve(self, blocks: Mapping[Holder, Sequence[int]]) -> dict[int, int]:
        """A slot for each of these blocks, which several of the new holders may name. Returns block → slot, to be `put`.

        Raises LedgerError when there is no room (ask `free`), or for a holder that is known; then nothing was changed.
        """
        distinct = dict.fromkeys(block for of_holder in blocks.values() for block in of_holder)
        if len(distinct) > self.free or any(holder in self._saved for holder in blocks):
            raise LedgerError(f"{len(distinct)} blocks of {list(blocks)} cannot be saved: {self.free} slots are free")
        slots = {block: self._next + place for place, block in enumerate(distinct)}
        self._next += len(slots)
        for holder, of_holder in blocks.items():
            self._saved[holder] = tuple(slots[block] for block in of_holder)
        self._references.update(Counter(slot for holder in blocks for slot in self._saved[holder]))
        return slots

    def put(self, slot: int, content: bytes) -> None:
        """What a reserved slot holds. Nothing, when its holders are gone meanwhile."""
        if slot in self._references:
            self._contents[slot] = content

    def get(self, slot: int) -> bytes:
        return self._contents[slot]

    def slots(self, holder: Holder) -> tuple[int, ...]:
        """Of the holder's blocks, in the order they were saved; () when it is unknown."""
        return self._saved.get(holder, ())

    def drop(self, holder: Holder) -> None:
        """The holder needs its blocks no more. Idempotent."""
        for slot in self._saved.pop(holder, ()):
            self._references[slot] -= 1
            if not self._references[slot]:
                del self._references[slot]
                self._contents.pop(slot, None)

    def orphaned(self, live: Collection[Holder]) -> int:
        """How many slots only holders outside `live` name."""
        return self.used - len(_distinct(slots for holder, slots in self._saved.items() if holder in live))

    def problems(self) -> list[str]:
        """What is wrong with the books, one sentence each."""
        counted = Counter(slot for slots in self._saved.values() for slot in slots)
        found = []
        if counted != Counter(self._references):
            found.append(f"the swap space counts {self._references}, its holders {dict(counted)}")
        if unknown := self._contents.keys() - self._references.keys():
            found.append(f"the swap space keeps what nobody holds: {sorted(unknown)}")
        if self.used > self.total:
            found.append(f"the swap space holds {self.used} blocks of at most {self.total}")
        return found


def _distinct(groups: Iterable[tuple[int, ...]]) -> set[int]:
    return {slot for slots in groups for slot in slots}
