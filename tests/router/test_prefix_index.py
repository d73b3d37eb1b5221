from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.router import prefix_index
from services.router.prefix_index import EXPECT_S, SHARDS, PrefixIndex


def name(number: int) -> bytes:
    return Random(number).randbytes(16)


CHAIN = [name(number) for number in range(8)]


def cleared(index: PrefixIndex) -> None:
    for _ in range(2 * SHARDS):
        index.clear_some()


def test_each_holder_has_its_own_length() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN[:3])
    index.stored("b", CHAIN)
    index.stored("c", CHAIN[1:])
    index.stored("d", CHAIN[:1])
    assert index.hits(CHAIN) == {"a": 3, "b": 8, "d": 1}
    assert index.hits([name(99), *CHAIN]) == {}
    assert index.hits([]) == {}


def test_a_hole_ends_a_prefix() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN)
    assert index.removed("a", [CHAIN[4]]) == 0
    assert index.hits(CHAIN) == {"a": 4}
    assert index.removed("a", CHAIN[4:6]) == 1, "one of them it did not have"


def test_a_look_up_asks_for_no_more_than_somebody_has() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN[:2])
    asked = []

    def chain() -> object:
        for block in CHAIN:
            asked.append(block)
            yield block

    assert index.hits(chain()) == {"a": 2}  # type: ignore[arg-type]
    assert asked == CHAIN[:3]


def test_who_is_forgotten_has_nothing_and_leaves_nothing_to_the_next() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN)
    index.expect("a", CHAIN, now=0.0)
    index.stored("b", CHAIN[:2])
    index.forget("a")
    assert index.hits(CHAIN) == {"b": 2}
    index.stored("c", CHAIN[:1])
    assert index.hits(CHAIN) == {"b": 2, "c": 1}
    cleared(index)
    index.stored("d", [name(50)])
    assert index.hits(CHAIN) == {"b": 2, "c": 1}, "the bit of a was given out again, its blocks were not"
    assert len(index) == 3


def test_a_set_of_holders_is_named_anew_when_a_bit_changes_hands() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN)
    assert index.hits(CHAIN) == {"a": 8}
    index.forget("a")
    cleared(index)
    index.stored("b", CHAIN[:4])
    assert index.hits(CHAIN) == {"b": 4}


def test_a_process_can_come_back() -> None:
    index = PrefixIndex()
    index.stored("a", CHAIN)
    index.forget("a")
    index.stored("a", CHAIN[:2])
    assert index.hits(CHAIN) == {"a": 2}
    cleared(index)
    assert index.hits(CHAIN) == {"a": 2}
    assert len(index) == 2


def test_what_was_just_placed_counts_until_it_is_stored_or_for_a_while() -> None:
    index = PrefixIndex()
    index.expect("a", CHAIN[:4], now=0.0)
    assert index.hits(CHAIN) == {"a": 4}
    index.stored("a", CHAIN[:2])
    index.expire(EXPECT_S)
    assert index.hits(CHAIN) == {"a": 2}
    assert not index._expected


def test_expectations_are_bounded() -> None:
    index = PrefixIndex()
    rounds = prefix_index.MAX_EXPECTED // 4096 + 8
    for number in range(rounds):
        index.expect(
            "a",
            [bytes([number % 256]) + number.to_bytes(8, "big") + bytes([i >> 8, i & 255, 0, 0, 0, 0, 0]) for i in range(4096)],
            0.0,
        )
    assert len(index._expected) <= prefix_index.MAX_EXPECTED + 4096


operation = st.tuples(
    st.sampled_from(["stored", "removed", "forget", "clear"]), st.sampled_from("abc"), st.lists(st.integers(0, 5), max_size=4)
)


@given(st.lists(operation, max_size=40))
def test_it_is_what_a_set_for_each_process_would_be(operations: list[tuple[str, str, list[int]]]) -> None:
    index, sets = PrefixIndex(), dict[str, set[bytes]]()
    for kind, process, numbers in operations:
        blocks = [CHAIN[number] for number in dict.fromkeys(numbers)]
        match kind:
            case "stored":
                index.stored(process, blocks)
                sets.setdefault(process, set()).update(blocks)
            case "removed":
                known = sets.setdefault(process, set())
                assert index.removed(process, blocks) == sum(block not in known for block in blocks)
                known.difference_update(blocks)
            case "forget":
                index.forget(process)
                sets.pop(process, None)
            case _:
                cleared(index)
    expected = {process: next((n for n, block in enumerate(CHAIN) if block not in held), 8) for process, held in sets.items()}
    assert index.hits(CHAIN) == {process: n for process, n in expected.items() if n}
    cleared(index)
    assert len(index) == len(set().union(*sets.values()))
