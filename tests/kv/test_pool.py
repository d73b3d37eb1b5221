"""The block ledger, case by case."""

from __future__ import annotations

import re

import pytest
import xxhash

from services.kv.holders import HandoffHolder, Holder, LoanHolder, ReservationHolder, RunHolder
from services.kv.integrity import find_problems
from services.kv.pool import BlockPool, LedgerError, PoolExhausted
from tests.kv.fakes import FakePrefixCache

RUN, OTHER = RunHolder(1), RunHolder(2)


def keys(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def sizes(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.free, pool.cached, pool.held


def test_holders_of_different_kinds_are_different() -> None:
    kinds = {kind(7) for kind in (RunHolder, HandoffHolder, ReservationHolder, LoanHolder)}
    assert len(kinds) == 4
    assert HandoffHolder(7) == HandoffHolder(7)


def test_allocate_extend_release() -> None:
    pool = BlockPool(5)
    first = pool.allocate(RUN, 2)
    more = pool.extend(RUN, 1)
    assert pool.blocks(RUN) == (*first, *more)
    assert sizes(pool) == (2, 0, 3)
    pool.release(RUN)
    pool.release(RUN)
    assert sizes(pool) == (5, 0, 0)
    assert pool.blocks(RUN) == ()


def test_exhaustion_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(RUN, 2)
    with pytest.raises(PoolExhausted, match=r"2 KV blocks asked for, 1 of 3"):
        pool.allocate(OTHER, 2)
    with pytest.raises(PoolExhausted):
        pool.extend(RUN, 2)
    assert sizes(pool) == (1, 0, 2)
    assert pool.holders == (RUN,)


def test_generation_is_raised_on_every_reuse_and_only_then() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(RUN, 1)
    first = pool.generation(block)
    pool.transfer(RUN, HandoffHolder(1), expires=1.0)
    pool.hold(OTHER, [block])
    pool.release(HandoffHolder(1))
    pool.release(OTHER)
    assert pool.generation(block) == first
    pool.allocate(RUN, 1)
    assert pool.generation(block) == first + 1


def test_shared_block_stays_until_its_last_holder_ends() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(RUN, 2)
    pool.hold(OTHER, blocks[:1])
    pool.hold(OTHER, blocks[:1])
    pool.release(RUN)
    assert sizes(pool) == (1, 0, 1)
    pool.release(OTHER)
    assert sizes(pool) == (2, 0, 0)


def test_sharing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(RUN, 1)
    with pytest.raises(LedgerError, match="hold nothing"):
        pool.hold(OTHER, [block, 1 - block])
    assert sizes(pool) == (1, 0, 1)
    assert pool.holders == (RUN,)


def test_transfer_moves_no_block_and_starts_a_lease() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(ReservationHolder(1), 3, expires=2.0)
    pool.transfer(ReservationHolder(1), RUN)
    assert pool.blocks(RUN) == tuple(blocks)
    assert pool.expire(1e9) == []
    pool.transfer(RUN, HandoffHolder(1), expires=5.0)
    assert pool.expire(4.999) == []
    assert pool.expire(5.0) == [HandoffHolder(1)]
    assert pool.leases_lapsed == 1
    assert sizes(pool) == (3, 0, 0)


def test_a_lease_that_ran_out_cannot_be_renewed() -> None:
    pool = BlockPool(1)
    holder = HandoffHolder(1)
    pool.allocate(holder, 1, expires=2.0)
    assert pool.renew(holder, 3.0, now=1.9)
    assert not pool.renew(holder, 9.0, now=3.0)
    assert not pool.alive(holder, 3.0)
    assert pool.expire(3.0) == [holder]
    assert not pool.renew(holder, 9.0, now=3.0)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.allocate(RUN, 1),
        lambda pool: pool.allocate(OTHER, -1),
        lambda pool: pool.extend(OTHER, 1),
        lambda pool: pool.transfer(OTHER, HandoffHolder(2)),
        lambda pool: pool.transfer(RUN, RUN),
        lambda pool: pool.give_back(OTHER, []),
        lambda pool: pool.give_back(RUN, [2]),
        lambda pool: pool.seal(RUN, [2], keys(1)),
        lambda pool: pool.seal(RUN, [0], []),
        lambda pool: pool.seal(OTHER, [], []),
        lambda pool: pool.claim(OTHER, 3, [2]),
        lambda pool: pool.view(0),
    ],
)
def test_misuse_raises_and_changes_nothing(misuse) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(3)
    assert pool.allocate(RUN, 1) == [0]
    with pytest.raises(LedgerError):
        misuse(pool)
    assert sizes(pool) == (2, 0, 1)
    assert pool.blocks(RUN) == (0,)


def test_give_back_frees_what_nobody_else_holds() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(RUN, 3)
    pool.hold(OTHER, blocks[:1])
    pool.give_back(RUN, blocks[:2])
    assert pool.blocks(RUN) == (blocks[2],)
    assert sizes(pool) == (2, 0, 2)


def test_released_sealed_blocks_are_cached_and_found_again() -> None:
    pool = BlockPool(4, prefix=(cache := FakePrefixCache()))
    blocks = pool.allocate(RUN, 3)
    pool.seal(RUN, blocks[:2], keys(1, 2))
    assert pool.prefix.match(keys(1, 2, 3)) == blocks[:2], "shareable as soon as it is full"
    pool.release(RUN)
    assert sizes(pool) == (2, 2, 0)
    generations = [pool.generation(block) for block in blocks]
    pool.hold(OTHER, pool.prefix.match(keys(1, 2)))
    assert sizes(pool) == (2, 0, 2)
    assert [pool.generation(block) for block in blocks] == generations
    assert cache.drain_events().stored == tuple(keys(1, 2))


def test_an_identity_known_already_is_not_cached_twice() -> None:
    pool = BlockPool(2, prefix=FakePrefixCache())
    pool.seal(RUN, pool.allocate(RUN, 1), keys(1))
    pool.seal(OTHER, pool.allocate(OTHER, 1), keys(1))
    pool.release(RUN)
    pool.release(OTHER)
    assert sizes(pool) == (1, 1, 0)


def test_the_block_that_the_cache_has_takes_the_place_of_a_twin() -> None:
    pool = BlockPool(6, prefix=FakePrefixCache())
    first = pool.allocate(RUN, 2)
    pool.seal(RUN, first, keys(1, 2))
    second = pool.allocate(OTHER, 4)
    assert pool.seal(OTHER, second[:3], keys(1, 2, 3)) == [*first, second[2]]
    assert pool.blocks(OTHER) == (*first, *second[2:]), "in their places"
    assert sizes(pool) == (2, 0, 4)
    pool.release(RUN)
    assert sizes(pool) == (2, 0, 4), "OTHER holds them, too"
    pool.release(OTHER)
    assert sizes(pool) == (3, 3, 0)


def test_twins_of_one_holder_become_one_block() -> None:
    pool = BlockPool(3, prefix=FakePrefixCache())
    first, second, tail = pool.allocate(RUN, 3)
    assert pool.seal(RUN, [first, second], keys(1, 1)) == [first, first]
    assert pool.blocks(RUN) == (first, tail)
    assert sizes(pool) == (1, 0, 2)


def test_without_a_cache_sealing_changes_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(RUN, 2)
    assert pool.seal(RUN, blocks, keys(1, 1)) == blocks
    assert pool.blocks(RUN) == tuple(blocks)


def test_a_claim_puts_shared_blocks_first_and_keeps_what_the_holder_has() -> None:
    pool = BlockPool(6, prefix=FakePrefixCache())
    chain = pool.allocate(OTHER, 2)
    pool.seal(OTHER, chain, keys(1, 2))
    pool.release(OTHER)
    reserved = pool.allocate(RUN, 2)
    blocks = pool.claim(RUN, 5, pool.prefix.match(keys(1, 2)))
    assert blocks[:4] == (*chain, *reserved)
    assert len(set(blocks)) == 5
    assert pool.blocks(RUN) == blocks
    assert sizes(pool) == (1, 0, 5)


def test_a_claim_gives_back_what_is_too_much() -> None:
    pool = BlockPool(5, prefix=FakePrefixCache())
    chain = pool.allocate(OTHER, 2)
    pool.seal(OTHER, chain, keys(1, 2))
    reserved = pool.allocate(RUN, 3)
    assert pool.claim(RUN, 3, chain) == (*chain, reserved[0])
    assert sizes(pool) == (2, 0, 3)
    assert pool.claim(RUN, 2, chain) == tuple(chain)
    assert pool.claim(RUN, 2, chain) == tuple(chain), "again changes nothing"
    assert sizes(pool) == (3, 0, 2)


def test_a_claim_counts_what_it_shares_as_taken() -> None:
    """Three blocks are available, two of them are what is to be shared: no more than one new one can come with them."""
    pool = BlockPool(3, prefix=(cache := FakePrefixCache()))
    chain = pool.allocate(OTHER, 2)
    pool.seal(OTHER, chain, keys(1, 2))
    pool.release(OTHER)
    with pytest.raises(PoolExhausted, match=r"2 KV blocks asked for, 1 of 3"):
        pool.claim(RUN, 4, chain)
    assert pool.holders == ()
    assert sizes(pool) == (1, 2, 0)
    assert pool.claim(RUN, 3, chain)[:2] == tuple(chain)
    assert cache.drain_events().removed == ()


def test_only_what_one_holder_has_and_nobody_knows_is_writable() -> None:
    pool = BlockPool(3, prefix=FakePrefixCache())
    full, shared, tail = pool.allocate(RUN, 3)
    pool.seal(RUN, [full], keys(1))
    pool.hold(OTHER, [shared])
    assert [pool.writable(block) for block in (full, shared, tail)] == [False, False, True]
    pool.release(OTHER)
    assert pool.writable(shared)
    pool.release(RUN)
    assert not pool.writable(tail)


def test_cached_blocks_are_evicted_only_when_no_free_one_is_left_the_chain_end_first() -> None:
    pool = BlockPool(3, prefix=(cache := FakePrefixCache()))
    blocks = pool.allocate(RUN, 2)
    pool.seal(RUN, blocks, keys(1, 2))
    pool.release(RUN)
    pool.allocate(OTHER, 1)
    assert sizes(pool) == (0, 2, 1)
    pool.extend(OTHER, 1)
    assert pool.prefix.match(keys(1)) == blocks[:1]
    assert cache.drain_events().removed == tuple(keys(2))
    assert pool.available == 1


def test_a_cache_that_breaks_its_promise_is_found_out() -> None:
    pool = BlockPool(1, prefix=(cache := FakePrefixCache()))
    pool.seal(RUN, pool.allocate(RUN, 1), keys(1))
    pool.release(RUN)
    cache.evict_wrongly = True
    with pytest.raises(LedgerError, match="evicted"):
        pool.allocate(OTHER, 1)


def test_orphans_are_blocks_whose_holders_nobody_knows() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(RUN, 3)
    pool.hold(OTHER, blocks[:1])
    assert pool.orphaned([RUN, OTHER]) == []
    assert pool.orphaned([OTHER]) == blocks[1:]
    assert pool.orphaned([]) == blocks


def test_views_are_regions_of_the_memory_that_was_passed_in() -> None:
    memory = bytearray(12)
    pool = BlockPool(3, block_bytes=4, memory=memoryview(memory))
    pool.view(1)[:] = b"abcd"
    assert memory == b"\0\0\0\0abcd\0\0\0\0"
    for outside in (-1, 3):
        with pytest.raises(LedgerError, match=r"outside 0\.\.2"):
            pool.view(outside)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(LedgerError, match="do not fill"):
        BlockPool(3, block_bytes=4, memory=memoryview(bytearray(13)))


def test_checksum_is_taken_once_a_generation() -> None:
    pool = BlockPool(1, block_bytes=4, memory=memoryview(bytearray(b"full")))
    [block] = pool.allocate(RUN, 1)
    assert pool.checksum(block) == xxhash.xxh3_64_intdigest(b"full")
    pool.view(block)[:] = b"evil"
    assert pool.checksum(block) == xxhash.xxh3_64_intdigest(b"full")
    pool.release(RUN)
    pool.allocate(OTHER, 1)
    assert pool.checksum(block) == xxhash.xxh3_64_intdigest(b"evil")


@pytest.mark.parametrize(
    ("books", "problem"),
    [
        ({"free": [0]}, "free and held: \\[0\\]|is not 3"),
        ({"free": [1, 1, 2]}, "free twice"),
        ({"free": [2]}, "neither free, cached nor held: \\[1\\]"),
        ({"refs": [2, 0, 0]}, "block 0 counts 2 references and has 1 holders"),
        ({"cached": [0], "indexed": [0]}, "cached and held: \\[0\\]"),
        ({"free": [2], "cached": [1]}, "cached, unknown to the prefix cache: \\[1\\]"),
        ({"cached": [1], "indexed": [1]}, "free and cached: \\[1\\]"),
        ({"indexed": [1]}, "free, known to the prefix cache: \\[1\\]"),
        ({"held": [[0], [1]]}, "block 1 counts 0 references and has 1 holders"),
    ],
)
def test_every_inconsistency_is_named(books: dict[str, list[int]], problem: str) -> None:
    sound = {"free": [1, 2], "cached": [], "indexed": [], "refs": [1, 0, 0], "held": [[0]]}
    assert find_problems(**sound) == []  # type: ignore[arg-type]
    assert any(re.search(problem, found) for found in find_problems(**{**sound, **books}))  # type: ignore[arg-type]


def test_check_integrity_raises_what_it_found() -> None:
    pool = BlockPool(2)
    pool.allocate(RUN, 1)
    pool._refs[0] = 2
    with pytest.raises(LedgerError, match="block 0 counts 2 references and has 1 holders"):
        pool.check_integrity()


def test_an_unknown_holder_holds_nothing() -> None:
    pool = BlockPool(1)
    stranger: Holder = LoanHolder(9)
    assert pool.blocks(stranger) == ()
    assert not pool.alive(stranger, 0.0)
