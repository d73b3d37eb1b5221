"""Detokenising and stop strings together: streamed or not, the same bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.text.stream import Delta, TextStream
from tests.text.tiny import END, byte_ids, tiny_tokenizer


def shown(ids: list[int], stops: list[str], cuts: list[int]) -> tuple[str, bool]:
    stream = TextStream(tiny_tokenizer(), stops)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [stream.push(ids[start:end]) for start, end in pairwise(edges)]
    return "".join(delta.text for delta in deltas) + stream.finish(), deltas[-1].stopped


@given(st.binary(max_size=30), st.lists(st.sampled_from(["é", "ab", "\n", "�"]), max_size=4), st.lists(st.integers(0, 30)))
def test_streamed_equals_whole(data: bytes, stops: list[str], cuts: list[int]) -> None:
    assert shown(byte_ids(data), stops, cuts) == shown(byte_ids(data), stops, [])


def test_a_stop_string_across_characters_split_over_tokens() -> None:
    stream = TextStream(tiny_tokenizer(), ["é!"])
    pieces = [byte_ids("caf"), byte_ids(b"\xc3"), byte_ids(b"\xa9"), byte_ids("!")]
    assert [stream.push(ids) for ids in pieces] == [
        Delta("caf", False),
        Delta("", False),
        Delta("", False),
        Delta("", True),
    ]


def test_without_stops_nothing_is_held() -> None:
    stream = TextStream(tiny_tokenizer())
    assert stream.push([*byte_ids("ab"), END]) == Delta("ab", False)
    assert stream.finish() == ""


def test_a_half_character_at_the_end_releases_what_the_stop_held() -> None:
    stream = TextStream(tiny_tokenizer(), ["abc"])
    assert stream.push([*byte_ids("xab"), *byte_ids(b"\xe2\x82")]) == Delta("x", False)
    assert stream.finish() == "ab"
