"""Ledger and prefix cache together, used as engines use them, beside an oracle: a dict, and a list in order of eviction.

A block is one token long, so a sequence of tokens is a chain of blocks, and few tokens make many chains that share beginnings.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv.hashing import block_hashes, cap_hit, chain_root
from services.kv.holders import HandoffHolder, Holder, LoanHolder, RunHolder
from services.kv.pool import BlockPool, PoolExhausted
from services.kv.prefix_cache import LruPrefixCache

BLOCKS = 9
ROOT = chain_root("k", b"salt")
runs = st.integers(1, 4)
chains = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def names(ids: list[int]) -> list[bytes]:
    return block_hashes(ids, 1, ROOT)


class CacheMachine(RuleBasedStateMachine):
    """`ids` and `computed` of each run; `written`: what each block's bytes are; `known`: identities each holder keeps alive."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = LruPrefixCache()
        self.pool = BlockPool(BLOCKS, prefix=self.cache)
        self.ids: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.written: dict[int, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.known: dict[Holder, list[bytes]] = {}
        self.indexed: set[bytes] = set()
        self.idle: list[bytes] = []
        self.mirror: set[bytes] = set()
        self.now = 0.0

    # what engines and workers do

    @rule(run=runs, ids=chains)
    def admit(self, run: int, ids: list[int]) -> None:
        if run in self.ids:
            return
        hashes = names(ids)
        hit = self._match(hashes[: cap_hit(len(ids), 1)])
        free, spare = self.pool.free, self.pool.available - len(set(self.idle) & set(hashes[: len(hit)]))
        missing = len(ids) - len(hit)
        try:
            blocks = self.pool.claim(RunHolder(run), len(ids), hit)
        except PoolExhausted:
            assert missing > spare
            return
        assert missing <= spare
        assert list(blocks[: len(hit)]) == hit
        self._pin(RunHolder(run), hashes[: len(hit)])
        self._evicted(missing - free)
        self.ids[run], self.computed[run] = ids, len(hit)

    @rule(run=runs, count=st.integers(1, 6))
    def compute(self, run: int, count: int) -> None:
        if run not in self.ids:
            return
        start, hashes = self.computed[run], names(self.ids[run])
        end = min(start + count, len(hashes))
        blocks = self.pool.blocks(RunHolder(run))[start:end]
        for block, name in zip(blocks, hashes[start:end], strict=True):
            assert self.pool.writable(block), "only a run's own unknown blocks are written"
            self.written[block] = name
        sealed = self.pool.seal(RunHolder(run), blocks, hashes[start:end])
        assert [self.written[block] for block in sealed] == hashes[start:end]
        for parent, name in zip([None, *hashes], hashes, strict=False):
            self.parents[name] = parent
        self.indexed.update(hashes[start:end])
        self._pin(RunHolder(run), hashes[start:end])
        self.computed[run] = end

    @rule(run=runs, token=st.integers(0, 1))
    def grow(self, run: int, token: int) -> None:
        if run not in self.ids:
            return
        free, available = self.pool.free, self.pool.available
        try:
            self.pool.extend(RunHolder(run), 1)
        except PoolExhausted:
            assert available == 0
            return
        self._evicted(1 - free)
        self.ids[run].append(token)

    @rule(run=runs)
    def end(self, run: int) -> None:
        self.ids.pop(run, None)
        self.pool.release(RunHolder(run))
        self._let_go(RunHolder(run))

    @rule(run=runs)
    def hand_off(self, run: int) -> None:
        holder = HandoffHolder(run)
        if run in self.ids and not self.pool.alive(holder, self.now):
            del self.ids[run]
            self.pool.expire(self.now)
            self._let_go(holder)
            self.pool.transfer(RunHolder(run), holder, expires=self.now + 2)
            self.known[holder] = self.known.pop(RunHolder(run), [])

    @rule(run=runs, ids=chains)
    def lend(self, run: int, ids: list[int]) -> None:
        holder = LoanHolder(run)
        if holder not in self.pool.holders:
            hit = self._match(names(ids))
            self.pool.hold(holder, hit, expires=self.now + 2)
            self._pin(holder, names(ids)[: len(hit)])

    @precondition(lambda self: any(not isinstance(holder, RunHolder) for holder in self.pool.holders))
    @rule()
    def leases_run_out(self) -> None:
        self.now += 3
        for holder in self.pool.expire(self.now):
            self._let_go(holder)

    @rule()
    def events(self) -> None:
        events = self.cache.drain_events()
        assert not set(events.stored) & set(events.removed)
        assert set(events.removed) <= self.mirror
        assert set(events.stored) <= self.indexed
        self.mirror = (self.mirror | set(events.stored)) - set(events.removed)
        assert self.mirror == self.indexed

    # the oracle

    def _match(self, hashes: list[bytes]) -> list[int]:
        hit = self.cache.match(hashes)
        due = next((i for i, name in enumerate(hashes) if name not in self.indexed), len(hashes))
        assert [self.written[block] for block in hit] == hashes[:due], "a hit is the longest there is, and what it says it is"
        return hit

    def _pin(self, holder: Holder, hashes: list[bytes]) -> None:
        self.known.setdefault(holder, []).extend(hashes)
        self.idle = [name for name in self.idle if name not in hashes]

    def _let_go(self, holder: Holder) -> None:
        mine = self.known.pop(holder, [])
        in_use = {name for held in self.known.values() for name in held}
        self.idle += [name for name in reversed(mine) if name not in in_use]

    def _evicted(self, count: int) -> None:
        for name in self.idle[: max(0, count)]:
            self.indexed.remove(name)
        self.idle = self.idle[max(0, count) :]

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.pool.check_integrity()
        assert self.pool.cached == len(self.idle)
        assert set(self.cache.identities(range(BLOCKS))) == self.indexed
        assert all(self.written[block] == self.cache.identities([block])[0] for block in self.cache.match(list(self.indexed)))

    @invariant()
    def no_child_without_its_parent(self) -> None:
        assert all(self.parents[name] is None or self.parents[name] in self.indexed for name in self.indexed)

    def teardown(self) -> None:
        for holder in self.pool.holders:
            self.pool.release(holder)
        self.pool.check_integrity()
        assert self.pool.available == BLOCKS


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=50)
