"""Any order of operations leaves the books consistent, and nobody ever gets a block that another one has."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kv.holders import HandoffHolder, Holder, ReservationHolder, RunHolder
from services.kv.pool import BlockPool, LedgerError, PoolExhausted
from tests.kv.fakes import FakePrefixCache

BLOCKS = 8
holders = st.builds(
    lambda kind, run: kind(run), st.sampled_from([RunHolder, HandoffHolder, ReservationHolder]), st.integers(1, 3)
)
leases = st.one_of(st.none(), st.integers(1, 5))


class PoolMachine(RuleBasedStateMachine):
    """`model` is what each holder must have, by block; `leases` what its lease must be."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = FakePrefixCache()
        self.pool = BlockPool(BLOCKS, prefix=self.cache)
        self.model: dict[Holder, set[int]] = {}
        self.leases: dict[Holder, float | None] = {}
        self.given_out = [0] * BLOCKS
        self.now = 0.0

    def _end(self, lease: int | None) -> float | None:
        return None if lease is None else self.now + lease

    def _got(self, holder: Holder, blocks: list[int]) -> None:
        held = set().union(*self.model.values()) if self.model else set()
        assert len(set(blocks)) == len(blocks)
        assert not held & set(blocks), "a block with a holder was given out"
        for block in blocks:
            self.given_out[block] += 1
        self.model.setdefault(holder, set()).update(blocks)

    @rule(holder=holders, n=st.integers(0, BLOCKS), lease=leases)
    def allocate(self, holder: Holder, n: int, lease: int | None) -> None:
        try:
            blocks = self.pool.allocate(holder, n, expires=self._end(lease))
        except LedgerError:
            assert holder in self.model
        except PoolExhausted:
            assert n > self.pool.available
        else:
            assert len(blocks) == n
            self._got(holder, blocks)
            self.model.setdefault(holder, set())
            self.leases[holder] = self._end(lease)

    @rule(holder=holders, n=st.integers(0, 3))
    def extend(self, holder: Holder, n: int) -> None:
        try:
            self._got(holder, self.pool.extend(holder, n))
        except LedgerError:
            assert holder not in self.model
        except PoolExhausted:
            assert n > self.pool.available

    @rule(holder=holders, other=holders, n=st.integers(0, BLOCKS), lease=leases)
    def share(self, holder: Holder, other: Holder, n: int, lease: int | None) -> None:
        blocks = self.pool.blocks(other)[:n]
        self._share(holder, list(blocks), lease)

    @rule(holder=holders, chain=st.integers(0, 3), lease=leases)
    def share_cached(self, holder: Holder, chain: int, lease: int | None) -> None:
        self._share(holder, self.pool.prefix.match(_chain(chain)), lease)

    def _share(self, holder: Holder, blocks: list[int], lease: int | None) -> None:
        if holder not in self.model:
            self.leases[holder] = self._end(lease)
        self.pool.hold(holder, blocks, expires=self._end(lease))
        self.model.setdefault(holder, set()).update(blocks)

    @rule(holder=holders, chain=st.integers(0, 3))
    def seal(self, holder: Holder, chain: int) -> None:
        if holder not in self.model:
            return
        blocks = self.pool.blocks(holder)
        sealed = self.pool.seal(holder, blocks, _chain(chain)[: len(blocks)])
        self.model[holder] = set(sealed)
        assert self.pool.blocks(holder) == tuple(dict.fromkeys(sealed)), "in their places"

    @rule(holder=holders, chain=st.integers(0, 3), n=st.integers(0, BLOCKS))
    def claim(self, holder: Holder, chain: int, n: int) -> None:
        shared = self.pool.prefix.match(_chain(chain))
        idle = self.cache.idle.keys() & set(shared)
        had, cached, before = self.pool.blocks(holder), self.pool.cached, self.pool.free + self.pool.cached
        try:
            blocks = self.pool.claim(holder, n, shared)
        except PoolExhausted:
            own = set(had) - set(shared)
            assert n - len(shared) - len(own) > before - len(idle)
            assert (self.pool.blocks(holder), self.pool.cached) == (had, cached)
            return
        self.leases.setdefault(holder, None)
        assert blocks[: len(shared)] == tuple(shared)
        assert len(blocks) == max(n, len(shared))
        fresh = [block for block in blocks if block not in had and block not in shared]
        self.model[holder] = set(blocks) - set(fresh)
        self._got(holder, fresh)

    @rule(old=holders, new=holders, lease=leases)
    def transfer(self, old: Holder, new: Holder, lease: int | None) -> None:
        try:
            self.pool.transfer(old, new, expires=self._end(lease))
        except LedgerError:
            assert old not in self.model or new in self.model
        else:
            self.model[new] = self.model.pop(old)
            del self.leases[old]
            self.leases[new] = self._end(lease)

    @rule(holder=holders, n=st.integers(0, BLOCKS))
    def give_back(self, holder: Holder, n: int) -> None:
        if holder in self.model:
            blocks = self.pool.blocks(holder)[:n]
            self.pool.give_back(holder, blocks)
            self.model[holder] -= set(blocks)

    @rule(holder=holders)
    def release(self, holder: Holder) -> None:
        self.pool.release(holder)
        self.model.pop(holder, None)
        self.leases.pop(holder, None)

    @rule(holder=holders, lease=st.integers(1, 5))
    def renew(self, holder: Holder, lease: int) -> None:
        end = self.leases.get(holder)
        due = holder in self.model and (end is None or end > self.now)
        assert self.pool.renew(holder, self.now + lease, now=self.now) == due
        if due:
            self.leases[holder] = self.now + lease

    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        due = {holder for holder, end in self.leases.items() if end is not None and end <= self.now}
        assert set(self.pool.expire(self.now)) == due
        for holder in due:
            del self.model[holder], self.leases[holder]

    @invariant()
    def books_are_consistent(self) -> None:
        self.pool.check_integrity()
        assert {holder: set(self.pool.blocks(holder)) for holder in self.pool.holders} == self.model
        assert self.pool.orphaned(list(self.model)) == []
        assert [self.pool.generation(block) for block in range(BLOCKS)] == self.given_out
        assert self.pool.cached == len(self.cache.idle)

    def teardown(self) -> None:
        for holder in self.pool.holders:
            self.pool.release(holder)
        self.pool.check_integrity()
        assert self.pool.held == 0


def _chain(chain: int) -> list[bytes]:
    return [bytes([chain, position]) * 8 for position in range(BLOCKS)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
