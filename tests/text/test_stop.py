"""Stop strings never leak, never swallow, and do not depend on how the text was split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text.stop import StopStrings


def run(stops: list[str], pieces: list[str], *, kept: bool = False) -> tuple[str, bool]:
    """All the text a client sees, and whether a stop was found."""
    matcher = StopStrings(stops, kept=kept)
    shown = "".join(matcher.push(piece)[0] for piece in pieces)
    return shown + matcher.finish(), matcher.stopped


def cut(text: str, stops: list[str], *, kept: bool = False) -> tuple[str, bool]:
    """The definition, slowly: the shortest beginning that ends with a stop, less the longest such stop unless it is `kept`."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if kept else end - max(map(len, complete))], True
    return text, False


few_letters = st.text("ab", max_size=30)


@given(few_letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(st.integers(0, 30)))
def test_equals_the_definition_however_the_text_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    for kept in (False, True):
        assert run(stops, pieces, kept=kept) == cut(text, stops, kept=kept)


@given(few_letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_no_more_than_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += matcher.push(character)[0]
        if matcher.stopped:
            break
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_over_several_tokens_shows_nothing() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == ("", True)


def test_held_text_is_released_when_it_turns_out_otherwise() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "x"]) == ("DEFGx", False)


def test_held_text_is_released_at_the_end() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G"]) == ("DEFG", False)


@pytest.mark.parametrize("stops", [["stop", "stopper"], ["stopper", "stop"]])
def test_of_two_stops_the_one_complete_first_wins(stops: list[str]) -> None:
    assert run(stops, ["a non", "stopper"]) == ("a non", True)


def test_of_two_complete_at_once_the_longest_wins() -> None:
    assert run(["b", "aab"], ["xaab"]) == ("x", True)


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopStrings(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_long_repetitive_stops_cost_a_step_a_character() -> None:
    stop, steps = "a" * 20_000 + "b", 60_000
    matcher = StopStrings([stop])
    shown = "".join(matcher.push("a")[0] for _ in range(steps))
    assert len(shown) == steps - 20_000
    assert matcher.push("b") == ("", True)
