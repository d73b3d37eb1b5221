"""Tokenizers and chat templates of the model families that the torch engine computes, as their authors ship them."""

from __future__ import annotations

import unicodedata
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from services.clock import ManualClock
from services.text.assets import TextAssets
from services.text.template import ChatTemplate, Message
from services.text.tokenizer import Tokenizer
from tests.text import families
from tests.text.families import LLAMA_TOKENS, QWEN_TEXT_TOKENS, QWEN_TOKENS, WHOLE

LLAMA, QWEN = families.llama3(), families.qwen()
TOKENIZERS = {"llama3": Tokenizer(LLAMA), "qwen": Tokenizer(QWEN)}
TODAY = datetime.fromtimestamp(ManualClock().wall()).strftime("%d %b %Y")
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello 1234"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
    {"role": "user", "content": "again"},
]
CALL = {"function": {"name": "look", "arguments": {"at": "é"}}}
TOOLS: list[Message] = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "seen"},
]


def pieces(name: str, text: str) -> list[str]:
    tokenizer = TOKENIZERS[name]
    return [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)]


@given(st.text(max_size=60))
def test_text_comes_back_whole(text: str) -> None:
    assert TOKENIZERS["llama3"].decode(TOKENIZERS["llama3"].encode_plain(text)) == text
    assert TOKENIZERS["qwen"].decode(TOKENIZERS["qwen"].encode_plain(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40))
def test_streaming_gives_the_same_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids, stream = tokenizer.encode_plain(text), tokenizer.detokenizer()
    assert "".join(stream.push([token]) for token in ids) == tokenizer.decode(ids)


def test_numbers_are_split_as_each_family_does() -> None:
    assert pieces("llama3", "1234") == ["12", "3", "4"]  # groups of three; the merge of 3 and 4 lies across two
    assert pieces("qwen", "1234") == ["1", "2", "3", "4"]


def test_a_word_is_looked_up_whole_before_it_is_merged() -> None:
    assert pieces("llama3", WHOLE) == [WHOLE]
    assert pieces("qwen", WHOLE) == list(WHOLE)


def test_a_composed_and_a_decomposed_letter_are_the_same_ids_in_qwen_only() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert TOKENIZERS["qwen"].encode(decomposed) == TOKENIZERS["qwen"].encode(composed)
    assert TOKENIZERS["llama3"].encode(decomposed) != TOKENIZERS["llama3"].encode(composed)


def test_nothing_is_put_before_a_text_but_by_the_template() -> None:
    tokenizer = TOKENIZERS["llama3"]
    assert tokenizer.encode("") == []
    prompt = families.prompts(LLAMA).encode([{"role": "user", "content": "hello"}])
    assert prompt.count(tokenizer.special_tokens[LLAMA_TOKENS[0]]) == 1


def test_which_tokens_are_control_and_which_are_text() -> None:
    tokenizer = TOKENIZERS["qwen"]
    assert set(tokenizer.special_tokens) == set(QWEN_TOKENS)
    for text in QWEN_TEXT_TOKENS:
        (token,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(token) == text.encode()
    assert tokenizer.decode(tokenizer.encode("<think>é</think><|im_end|>")) == "<think>é</think>"


def rendered(assets: TextAssets, messages: list[Message]) -> str:
    return ChatTemplate(assets, ManualClock()).render(messages)


def test_a_llama_chat() -> None:
    text = rendered(LLAMA, CHAT[:2])
    assert text == (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: {TODAY}\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhello 1234<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_qwen_chat_forgets_earlier_thoughts() -> None:
    assert rendered(QWEN, CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello 1234<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_and_their_results() -> None:
    assert (
        '<|end_header_id|>\n\n{"name": "look", "parameters": {"at": "é"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"seen"<|eot_id|>'
    ) in rendered(LLAMA, TOOLS)
    assert (
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n"
    ) in rendered(QWEN, TOOLS)


@pytest.mark.parametrize("messages", [CHAT[:2], CHAT, TOOLS], ids=["short", "long", "tools"])
@pytest.mark.parametrize("assets", [pytest.param(LLAMA, id="llama3"), pytest.param(QWEN, id="qwen")])
def test_prompts_are_those_of_transformers(assets: TextAssets, messages: list[Message]) -> None:
    library = PreTrainedTokenizerFast(tokenizer_object=Library.from_str(assets.tokenizer), **assets.special_tokens)
    assert assets.chat_template is not None
    dated = assets.chat_template.replace('strftime_now("%d %b %Y")', f"'{TODAY}'")  # theirs reads the real clock
    theirs = library.apply_chat_template(
        messages, chat_template=dated, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert families.prompts(assets).encode(messages) == theirs
