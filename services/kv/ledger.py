"""The ledger of one worker's KV blocks.

Owns: which block is free, cached or held, by whom and until when; generations. Must not know: memory, NATS, engines. Invariant
(`check_integrity`): free + cached + held = total, each block in exactly one state, reference counts equal holders. A generation
is raised each time a block is given out anew, so (block, generation) never names two contents.

Times are monotonic seconds of the caller's clock. Everything runs on one event loop; nothing here blocks or awaits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from schemas.errors import InternalError, Unavailable
from services.kv.holders import Holder
from services.kv.integrity import find_problems
from services.kv.prefix import NullPrefixCache, PrefixCache


class PoolExhausted(Unavailable):
    """Fewer free and cached blocks than asked for; nothing was changed."""


class LedgerError(InternalError):
    """The ledger was used wrongly or is inconsistent: a bug of ours, never load."""


@dataclass(slots=True)
class _Hold:
    """What one holder has: blocks in the order it got them (a dict as ordered set), and the end of its lease."""

    expires: float | None
    blocks: dict[int, None] = field(default_factory=dict)

    def lapsed(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


class BlockLedger:
    """The books of `blocks` blocks, all free at first.

    `withheld`: that many are given to nobody who asks, so that they gather for somebody who waits; the caller's to set.
    """

    def __init__(self, blocks: int, *, prefix: PrefixCache | None = None) -> None:
        self.total = blocks
        self.prefix: PrefixCache = NullPrefixCache() if prefix is None else prefix
        self.leases_lapsed = 0
        self.withheld = 0
        self._free = list(range(blocks - 1, -1, -1))  # a stack: a block just freed is warm in the CPU's caches
        self._refs = [0] * blocks
        self._generations = [0] * blocks
        self._indexed: set[int] = set()
        self._cached: set[int] = set()
        self._holds: dict[Holder, _Hold] = {}

    # what is where

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache keeps; they are given out when no free one is left."""
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """What `allocate` could give now."""
        return max(0, self.free + self.cached - self.withheld)

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._holds)

    def blocks(self, holder: Holder) -> tuple[int, ...]:
        """The holder's blocks in the order it got them; () when it is unknown (its lease may have run out)."""
        hold = self._holds.get(holder)
        return () if hold is None else tuple(hold.blocks)

    def alive(self, holder: Holder, now: float) -> bool:
        """True while the holder is known and its lease, if it has one, has not run out."""
        hold = self._holds.get(holder)
        return hold is not None and not hold.lapsed(now)

    def generation(self, block: int) -> int:
        return self._generations[block]

    # getting blocks

    def allocate(self, holder: Holder, n: int, *, expires: float | None = None) -> list[int]:
        """`n` blocks for a new holder. Raises PoolExhausted, LedgerError when the holder exists."""
        self._must_be_new(holder)
        blocks = self._take(n)
        self._holds[holder] = _Hold(expires, dict.fromkeys(blocks))
        return blocks

    def extend(self, holder: Holder, n: int) -> list[int]:
        """`n` more blocks for a known holder. Raises PoolExhausted, LedgerError when it is unknown."""
        hold = self._known(holder)
        blocks = self._take(n)
        hold.blocks.update(dict.fromkeys(blocks))
        return blocks

    def hold(self, holder: Holder, blocks: Sequence[int], *, expires: float | None = None) -> None:
        """Share cached or held blocks with `holder`, which is made (with this lease) when it is new.

        Blocks it already has stay counted once. Raises LedgerError for a free block; then nothing was changed.
        """
        free = [block for block in blocks if not self._in_use(block)]
        if free:
            raise LedgerError(f"{holder} would share blocks that hold nothing: {free}")
        hold = self._holds.setdefault(holder, _Hold(expires))
        self._reference(block for block in dict.fromkeys(blocks) if block not in hold.blocks)
        hold.blocks.update(dict.fromkeys(blocks))

    def claim(self, holder: Holder, n: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Make `holder`, known or new (with no lease), hold `shared` and after them blocks of its own, `n` in all.

        Its own are those it has, then new ones; what it has too many is given back. Returns its blocks in order. Raises
        PoolExhausted, LedgerError when a block of `shared` holds nothing; then nothing was changed.
        """
        hold = self._holds.get(holder) or _Hold(None)
        lead = dict.fromkeys(shared)
        if not all(self._in_use(block) for block in lead):
            raise LedgerError(f"{holder} would share blocks that hold nothing: {list(lead)}")
        own = [block for block in hold.blocks if block not in lead]
        missing = n - len(lead) - len(own)
        available = max(0, self.available - len(self._cached.intersection(lead)))
        if missing > available:
            raise PoolExhausted(f"{missing} KV blocks asked for, {available} of {self.total} available")
        self._reference(block for block in lead if block not in hold.blocks)  # before eviction could take them
        surplus = own[max(0, n - len(lead)) :]
        self._unreference(surplus)
        kept = own[: len(own) - len(surplus)]
        hold.blocks = dict.fromkeys((*lead, *kept, *self._take(max(0, missing))))
        self._holds[holder] = hold
        return tuple(hold.blocks)

    def seal(self, holder: Holder, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """These blocks of `holder` are full, have these identities and are never written again; the cache may index them.

        Where the cache has an older block of the same identity, that one takes the holder's block's place, which is given
        back: so a holder of a block holds the cached blocks before it, too. Returns the blocks that are there now. No
        step may be using them. Raises LedgerError.
        """
        hold = self._known(holder)
        if len(blocks) != len(hashes) or any(block not in hold.blocks for block in blocks):
            raise LedgerError("only its own blocks, each with its identity, may a holder seal")
        new = {block: key for block, key in zip(blocks, hashes, strict=True) if block not in self._indexed}
        kept = self.prefix.insert(list(new.values()), list(new))
        self._indexed.update(block for block, known in zip(new, kept, strict=True) if known == block)
        older = {b: known for b, known in zip(new, kept, strict=True) if known is not None and known != b}
        if older:
            self._reference(block for block in dict.fromkeys(older.values()) if block not in hold.blocks)
            hold.blocks = dict.fromkeys(older.get(block, block) for block in hold.blocks)
            self._unreference(older)
        return [older.get(block, block) for block in blocks]

    def shared(self, blocks: Iterable[int]) -> int:
        """How many of these somebody holds: sharing them takes nothing of what is available."""
        return sum(self._refs[block] > 0 for block in blocks)

    def writable(self, block: int) -> bool:
        """True while one holder alone has the block and nobody knows it as full: only then may a step write it."""
        return self._refs[block] == 1 and block not in self._indexed

    # leases

    def renew(self, holder: Holder, expires: float, *, now: float) -> bool:
        """Move the end of a lease. False when the holder is unknown or its lease has run out: that is final."""
        if not self.alive(holder, now):
            return False
        self._holds[holder].expires = expires
        return True

    def transfer(self, old: Holder, new: Holder, *, expires: float | None = None) -> None:
        """Everything `old` holds becomes `new`'s, under a new lease; no block moves. Raises LedgerError."""
        hold = self._known(old)
        self._must_be_new(new)
        del self._holds[old]
        hold.expires = expires
        self._holds[new] = hold

    def expire(self, now: float) -> list[Holder]:
        """Release every holder whose lease ran out, and name them."""
        lapsed = [holder for holder, hold in self._holds.items() if hold.lapsed(now)]
        for holder in lapsed:
            self.release(holder)
        self.leases_lapsed += len(lapsed)
        return lapsed

    # giving blocks back

    def release(self, holder: Holder) -> None:
        """The holder ends. Its blocks go to the prefix cache where that keeps them, else they are free. Idempotent."""
        hold = self._holds.pop(holder, None)
        if hold is not None:
            self._unreference(hold.blocks)

    def give_back(self, holder: Holder, blocks: Iterable[int]) -> None:
        """A known holder drops some of its blocks. Raises LedgerError for one that it does not have."""
        hold = self._known(holder)
        dropped = dict.fromkeys(blocks)
        foreign = [block for block in dropped if block not in hold.blocks]
        if foreign:
            raise LedgerError(f"{holder} does not hold {foreign}")
        for block in dropped:
            del hold.blocks[block]
        self._unreference(dropped)

    # proof

    def orphaned(self, live: Collection[Holder]) -> list[int]:
        """Blocks that only holders outside `live` hold; the metric kv_blocks_orphaned is their number."""
        known = {block for holder in live for block in self.blocks(holder)}
        return [block for block, refs in enumerate(self._refs) if refs and block not in known]

    def check_integrity(self) -> None:
        """Raises LedgerError that says what is wrong with the books."""
        problems = find_problems(
            free=self._free,
            cached=self._cached,
            indexed=self._indexed,
            refs=self._refs,
            held=[hold.blocks for hold in self._holds.values()],
        )
        if problems:
            raise LedgerError("; ".join(problems))

    # inside

    def _in_use(self, block: int) -> bool:
        return self._refs[block] > 0 or block in self._cached

    def _known(self, holder: Holder) -> _Hold:
        hold = self._holds.get(holder)
        if hold is None:
            raise LedgerError(f"{holder} holds nothing here")
        return hold

    def _must_be_new(self, holder: Holder) -> None:
        if holder in self._holds:
            raise LedgerError(f"{holder} already holds blocks")

    def _take(self, n: int) -> list[int]:
        if n < 0:
            raise LedgerError(f"{n} blocks were asked for")
        if n > self.available:
            raise PoolExhausted(f"{n} KV blocks asked for, {self.available} of {self.total} available")
        if n > self.free:
            self._evict(n - self.free)
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
            self._generations[block] += 1
        return blocks

    def _evict(self, n: int) -> None:
        evicted = self.prefix.evict(n)
        if len(evicted) != n or not self._cached.issuperset(evicted):
            raise LedgerError(f"the prefix cache evicted {evicted} where {n} of {sorted(self._cached)} were due")
        self._cached.difference_update(evicted)
        self._indexed.difference_update(evicted)
        self._free += evicted

    def _reference(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._refs[block] += 1
            if block in self._cached:
                self._cached.remove(block)
                self.prefix.pin([block])

    def _unreference(self, blocks: Iterable[int]) -> None:
        last_first = list(blocks)[::-1]
        for block in last_first:
            self._refs[block] -= 1
        unheld = [block for block in last_first if self._refs[block] == 0]
        kept = [block for block in unheld if block in self._indexed]
        self._cached.update(kept)
        self.prefix.unpin(kept)
        self._free += [block for block in unheld if block not in self._indexed]
