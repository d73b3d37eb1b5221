"""Never half a character, and the same text however the ids are split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from services.text.assets import TextAssets, TextError
from services.text.tokenizer import Tokenizer
from tests.text.tiny import END, byte_ids, tiny_tokenizer, tiny_tokenizer_json


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The deltas when `ids` arrive in pieces that end at `cuts`."""
    detokenizer = tokenizer.detokenizer()
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]


def lossy_without_tail(data: bytes) -> str:
    """What Python makes of `data`, less an unfinished character at its end."""
    for unfinished in range(min(3, len(data)), 0, -1):
        try:
            data[-unfinished:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-unfinished].decode(errors="replace")
    return data.decode(errors="replace")


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_any_bytes_in_any_pieces_give_one_text(data: bytes, cuts: list[int]) -> None:
    assert "".join(streamed(tiny_tokenizer(), byte_ids(data), cuts)) == lossy_without_tail(data)


@given(st.text(max_size=20), st.lists(st.integers(0, 80)))
def test_whole_text_never_shows_a_replacement_character(text: str, cuts: list[int]) -> None:
    deltas = streamed(tiny_tokenizer(), byte_ids(text), cuts)
    assert "".join(deltas) == text
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@given(st.lists(st.integers(0, tiny_tokenizer().size - 1), max_size=30))
def test_equals_the_library_but_for_an_unfinished_end(ids: list[int]) -> None:
    library = Library.from_str(tiny_tokenizer_json()).decode(ids, skip_special_tokens=True)
    ours = tiny_tokenizer().decode(ids)
    assert library.startswith(ours)
    assert library.removeprefix(ours) in ("", "\ufffd")


def test_an_emoji_over_three_tokens_comes_with_the_last() -> None:
    detokenizer = tiny_tokenizer().detokenizer()
    first, second, third = byte_ids(b"\xf0\x9f"), byte_ids(b"\x98"), byte_ids(b"\x8a")
    assert [detokenizer.push(ids) for ids in (first, second, third)] == ["", "", "😊"]


def test_a_character_cut_by_the_token_limit_is_left_out() -> None:
    assert tiny_tokenizer().decode(byte_ids("ok") + byte_ids(b"\xf0\x9f")) == "ok"


def test_special_and_unknown_ids_have_no_text() -> None:
    assert tiny_tokenizer().decode([*byte_ids("a"), END, 10**6, *byte_ids("b")]) == "ab"


def test_a_special_token_does_not_join_two_half_characters_wrongly() -> None:
    half, rest = byte_ids(b"\xc3"), byte_ids(b"\xa9")
    assert tiny_tokenizer().decode([*half, END, *rest]) == "é"


def sentencepiece() -> tuple[Tokenizer, Library]:
    """A tokenizer of Llama 2's kind: a piece a word, `<0xXX>` for every byte, a leading space that is none."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "ly", "é"]
    library = Library(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(TextAssets(library.to_str(), None, {}, frozenset({1}))), library


SENTENCEPIECE, SENTENCEPIECE_LIBRARY = sentencepiece()


@given(
    st.lists(st.one_of(st.sampled_from([258, 259, 260, 261, 262]), st.sampled_from("aé€😊")), max_size=12),
    st.lists(st.integers(0, 40)),
)
def test_byte_fallback_equals_the_library(items: list[int | str], cuts: list[int]) -> None:
    ids = [i for item in items for i in ([item] if isinstance(item, int) else [2 + byte for byte in item.encode()])]
    assert "".join(streamed(SENTENCEPIECE, ids, cuts)) == SENTENCEPIECE_LIBRARY.decode(ids)


def test_a_decoder_of_another_family_is_refused() -> None:
    content = json.loads(tiny_tokenizer_json())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(TextError, match="WordPiece"):
        Tokenizer(TextAssets(json.dumps(content), None, {}, frozenset()))


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"model": {"vocab": 3}}'])
def test_a_damaged_tokenizer_is_one_clear_error(broken: str) -> None:
    with pytest.raises(TextError):
        Tokenizer(TextAssets(broken, None, {}, frozenset()))
