"""Guesses from what came before, how many of them, and which are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.drafts import ROWS, allowed, next_limit, propose
from services.engine.drawing import accept
from services.engine.runner import Failed, Sampled

ids = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16777216]), max_size=40)
"""Ids whose bytes look alike between two of them."""


@pytest.mark.parametrize(
    ("before", "most", "expected"),
    [
        ([], 4, ()),
        ([1, 2, 3], 4, ()),
        ([7, 7], 4, ()),
        ([1, 2, 9, 8, 7, 1, 2], 3, (9, 8, 7)),
        ([1, 2, 9, 8, 7, 1, 2], 7, (9, 8, 7, 1, 2, 9, 8)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, (4, 1)),
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 2, (3, 6)),
        ([7, 7, 7], 4, (7, 7, 7, 7)),
        ([1, 2, 3, 2], 4, ()),
        ([1, 2, 9, 8, 7, 1, 2], 0, ()),
    ],
    ids=[
        "nothing",
        "no repetition",
        "too short",
        "what followed",
        "goes on",
        "the last place",
        "the longest",
        "a loop",
        "one id",
        "0",
    ],
)
def test_what_is_proposed(before: list[int], most: int, expected: tuple[int, ...]) -> None:
    assert propose(before, most) == expected


@given(ids, st.integers(1, 10))
def test_a_proposal_is_what_followed_the_longest_suffix_that_was_there_before(before: list[int], most: int) -> None:
    draft = propose(before, most)
    for length in (4, 3, 2):
        places = [at for at in range(len(before) - length) if before[at : at + length] == before[-length:]]
        if places:
            shift = len(before) - length - places[-1]
            whole = [*before, *draft]
            assert len(draft) == most
            assert all(whole[at] == whole[at - shift] for at in range(len(before), len(whole)))
            return
    assert draft == ()


@pytest.mark.parametrize(
    ("limit", "rows", "most", "expected"),
    [(4, 1, 7, 4), (9, 1, 7, 7), (9, 1, 20, ROWS - 1), (9, 2, 7, 3), (9, 4, 7, 1), (9, 5, 7, 0), (9, 32, 7, 0), (4, 1, 0, 0)],
)
def test_how_many_are_guessed(limit: int, rows: int, most: int, expected: int) -> None:
    assert allowed(limit, rows, most) == expected
    assert rows * (1 + expected) <= max(ROWS, rows)


@pytest.mark.parametrize(("drafted", "right", "expected"), [(4, 4, 8), (1, 1, 2), (4, 0, 1), (4, 3, 4), (8, 2, 3)])
def test_a_wrong_guess_makes_the_next_ones_shorter(drafted: int, right: int, expected: int) -> None:
    assert next_limit(drafted, right) == expected


@pytest.mark.parametrize(
    ("draft", "drawn", "kept"),
    [
        ([5, 6], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 9, 7], [5, 9]),
        ([5, 6], [8, 6, 7], [8]),
        ([5, 6], [5, None, 7], [5]),
    ],
    ids=["all right", "one right", "none right", "a failure waits its turn"],
)
def test_what_is_kept(draft: list[int], drawn: list[int | None], kept: list[int]) -> None:
    def draw(row: int) -> Sampled | Failed:
        token = drawn[row]
        return Failed("broken") if token is None else Sampled(token)

    assert accept(draft, draw) == tuple(map(Sampled, kept))


def test_a_first_draw_that_fails_fails_the_chunk() -> None:
    assert accept([5], lambda _: Failed("broken")) == Failed("broken")


def test_nothing_is_drawn_behind_a_complete_text() -> None:
    assert accept([5, 6], lambda row: Sampled(5 + row, complete=True)) == (Sampled(5, complete=True),)
