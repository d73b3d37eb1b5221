"""The swap space's books: slots are shared, freed with their last holder, never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.holders import ChoiceHolder, Holder, RunHolder
from services.kv.pool import BlockPool, LedgerError
from services.kv.swap import SwapSpace


def test_what_two_holders_share_is_kept_once_and_until_both_are_gone() -> None:
    space = SwapSpace(3)
    one, two = ChoiceHolder(1, 0), ChoiceHolder(1, 1)
    slots = space.reserve({one: [7, 8], two: [7, 9]})
    assert space.used == 3
    for block, slot in slots.items():
        space.put(slot, bytes([block]))
    assert [space.get(slot) for slot in space.slots(two)] == [b"\x07", b"\x09"]
    space.drop(one)
    assert space.used == 2
    assert space.get(space.slots(two)[0]) == b"\x07"
    space.drop(two)
    space.drop(two)
    assert (space.used, two in space) == (0, False)
    assert not space.problems()


def test_a_run_without_computed_blocks_is_there_all_the_same() -> None:
    space = SwapSpace(0)
    space.reserve({RunHolder(1): []})
    assert RunHolder(1) in space


def test_what_does_not_fit_changes_nothing() -> None:
    space = SwapSpace(2)
    space.reserve({RunHolder(1): [5]})
    with pytest.raises(LedgerError):
        space.reserve({RunHolder(2): [5, 6]})
    with pytest.raises(LedgerError):
        space.reserve({RunHolder(1): [6]})
    assert (space.used, space.holders) == (1, (RunHolder(1),))


def test_a_content_that_comes_after_its_holder_left_is_not_kept() -> None:
    space = SwapSpace(1)
    (slot,) = space.reserve({RunHolder(1): [5]}).values()
    space.drop(RunHolder(1))
    space.put(slot, b"late")
    assert not space.problems()


def test_releasing_a_holder_frees_both_and_leaving_the_pool_only_that() -> None:
    pool = BlockPool(4, block_bytes=2, memory=memoryview(bytearray(8)), swap=SwapSpace(4))
    blocks = pool.allocate(RunHolder(1), 2)
    pool.write(blocks[0], b"ab")
    pool.swap.reserve({RunHolder(1): blocks})
    pool.vacate(RunHolder(1))
    assert (pool.held, pool.swap.used) == (0, 2)
    pool.release(RunHolder(1))
    assert pool.swap.used == 0
    assert pool.read(blocks[0]) == b"ab"


def test_wrong_books_are_found() -> None:
    pool = BlockPool(1, swap=SwapSpace(1))
    slots = pool.swap.reserve({RunHolder(1): [0]})
    pool.check_integrity()
    pool.swap._references[slots[0]] += 1
    with pytest.raises(LedgerError, match="swap space counts"):
        pool.check_integrity()


def test_what_is_withheld_is_not_available() -> None:
    pool = BlockPool(4)
    pool.allocate(RunHolder(1), 1)
    pool.withheld = 2
    assert pool.available == 1
    pool.withheld = 9
    assert pool.available == 0
    assert pool.claim(RunHolder(1), 1) == pool.blocks(RunHolder(1))
    pool.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), unique=True)), max_size=30))
def test_any_order_of_saving_and_dropping(actions: list[tuple[int, list[int]]]) -> None:
    space = SwapSpace(8)
    live: dict[Holder, int] = {}
    for run, blocks in actions:
        holder = RunHolder(run)
        if holder in space:
            space.drop(holder)
            del live[holder]
        elif len(blocks) <= space.free:
            space.reserve({holder: blocks})
            live[holder] = len(blocks)
        assert not space.problems()
        assert space.used == sum(live.values())
        assert space.orphaned(list(live)[1:]) == sum(list(live.values())[:1])
