"""The prefix cache alone: what it finds, what goes first, what it says changed."""

from __future__ import annotations

import pytest

from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix import CacheEvents
from services.kv.prefix_cache import LruPrefixCache


def keys(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def filled(*names: int) -> LruPrefixCache:
    """Block i has the identity `names[i]`; all are pinned."""
    cache = LruPrefixCache()
    cache.insert(keys(*names), range(len(names)))
    return cache


def test_the_longest_known_beginning_matches() -> None:
    cache = filled(1, 2, 3)
    assert cache.match(keys(1, 2, 9, 3)) == [0, 1]
    assert cache.match(keys(9, 1)) == []
    assert cache.match([]) == []


def test_a_known_identity_keeps_its_block() -> None:
    cache = filled(1)
    assert cache.insert(keys(1, 2, 2), [5, 6, 7]) == [0, 6, 6]
    assert cache.match(keys(1, 2)) == [0, 6]
    assert cache.identities(range(8)) == keys(1, 2)
    assert len(cache) == 2


def test_what_was_let_go_first_goes_first_and_a_pinned_block_never() -> None:
    cache = filled(1, 2, 3, 4)
    cache.unpin([2, 0])
    cache.unpin([1])
    cache.pin([2])
    cache.unpin([2])  # used again: the last to go
    assert cache.evict(1) == [0]
    assert cache.evict(9) == [1, 2]
    assert cache.evict(1) == []
    assert cache.identities(range(4)) == keys(4)


def test_only_an_idle_block_can_be_pinned() -> None:
    with pytest.raises(KeyError):
        filled(1).pin([0])


def test_an_evicted_identity_may_come_again_in_another_block() -> None:
    cache = filled(1)
    cache.unpin([0])
    cache.evict(1)
    assert cache.match(keys(1)) == []
    assert cache.insert(keys(1), [3]) == [3]
    assert cache.match(keys(1)) == [3]


def test_events_say_what_came_and_went_in_order() -> None:
    cache = filled(2, 1)
    assert cache.drain_events() == CacheEvents(stored=tuple(keys(2, 1)))
    cache.insert(keys(2, 3), [7, 8])
    cache.unpin([1, 0])
    cache.evict(2)
    assert cache.drain_events() == CacheEvents(stored=tuple(keys(3)), removed=tuple(keys(1, 2)))
    assert cache.drain_events() == CacheEvents()


def test_what_came_and_went_between_two_drains_did_not_happen() -> None:
    cache = filled(1)
    cache.drain_events()
    cache.insert(keys(2), [1])
    cache.unpin([1, 0])
    cache.evict(2)
    assert cache.drain_events() == CacheEvents(removed=tuple(keys(1)))


def test_what_went_and_came_back_is_said_again() -> None:
    """It lies in another block now, and so on another page of a snapshot."""
    cache = filled(1)
    cache.drain_events()
    cache.unpin([0])
    cache.evict(1)
    cache.insert(keys(1), [7])
    assert cache.drain_events() == CacheEvents(stored=tuple(keys(1)))
    cache.unpin([7])
    cache.evict(1)
    assert cache.drain_events() == CacheEvents(removed=tuple(keys(1)))


def test_the_hook_is_called_once_a_drain() -> None:
    cache, calls = LruPrefixCache(), []
    cache.insert(keys(1), [0])
    cache.on_change(lambda: calls.append(len(cache)))
    cache.insert(keys(2), [1])
    assert calls == [], "somebody was told already: nobody drained since"
    cache.drain_events()
    cache.insert(keys(3, 4), [2, 3])
    cache.insert(keys(5), [4])
    assert calls == [3]
    cache.drain_events()
    cache.unpin([0])
    cache.evict(1)
    assert len(calls) == 2


def test_a_short_chain_used_again_outlives_the_end_of_the_long_one() -> None:
    """Children before parents, also when the parent is the older block."""
    cache = LruPrefixCache()
    pool = BlockPool(4, prefix=cache)
    long, short, big = RunHolder(1), RunHolder(2), RunHolder(3)
    pool.seal(long, pool.allocate(long, 3), keys(1, 2, 3))
    pool.release(long)
    pool.claim(short, 1, pool.prefix.match(keys(1)))
    pool.release(short)
    pool.allocate(big, 2)
    assert cache.match(keys(1, 2, 3)) == [0, 1]
    pool.extend(big, 1)
    assert cache.match(keys(1, 2, 3)) == [0]


def test_two_runs_that_computed_the_same_keep_the_parent_until_both_ended() -> None:
    cache = LruPrefixCache()
    pool = BlockPool(5, prefix=cache)
    first, second, big = RunHolder(1), RunHolder(2), RunHolder(3)
    mine, other = pool.allocate(first, 1), pool.allocate(second, 2)
    pool.seal(first, mine, keys(1))
    pool.seal(second, other, keys(1, 2))
    pool.release(first)
    assert pool.available == 3
    pool.allocate(big, 3)
    assert cache.match(keys(1, 2)) == [mine[0], other[1]]
