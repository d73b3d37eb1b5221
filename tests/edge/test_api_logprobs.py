"""Log-probabilities in answers: whose they are, in which form, and that they go with the text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.reply import FinishReason
from schemas.state import Capabilities
from tests.edge.fakes import Api, Script, says
from tests.edge.sse import read_stream
from tests.edge.test_api_refusals import check
from tests.text.tiny import END, byte_ids, tiny_tokenizer

HELLO = tiny_tokenizer().encode("hello")[0]


def api(script: Script) -> Api:
    made = Api()
    made.jobs.default = script
    made.jobs.capabilities = Capabilities(seed=True, logprobs=True)
    return made


async def entries(script: Script, **fields: Any) -> list[dict[str, Any]]:
    """The same streamed and whole. In a stream no entry is ahead of its text."""
    made = api(script)
    whole = (await made.post(logprobs=True, **fields)).json()["choices"][0]
    read = read_stream((await made.post(logprobs=True, stream=True, **fields)).content)
    assert whole["message"]["content"] == read.content
    assert whole["logprobs"] == {"content": read.logprobs, "refusal": None}
    assert all(math.isfinite(entry["logprob"]) for entry in read.logprobs)
    return read.logprobs


def joined(found: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"] or ()) for entry in found)


async def test_an_entry() -> None:
    token = byte_ids("A")[0]
    found = await entries(says("A"), top_logprobs=2)
    assert found == [
        {
            "token": "A",
            "logprob": -token / 1000,
            "bytes": [65],
            "top_logprobs": [
                {"token": "A", "logprob": -token / 1000, "bytes": [65]},
                {"token": "B", "logprob": -(token + 1) / 1000, "bytes": [66]},
            ],
        }
    ]
    assert (await entries(says("A")))[0]["top_logprobs"] == []


async def test_none_unless_asked_for() -> None:
    made = api(says("A"))
    assert (await made.post()).json()["choices"][0]["logprobs"] is None
    assert made.jobs.draft.sampling.logprobs is None
    check(await made.post(top_logprobs=2), 400, param="top_logprobs")
    check(await made.post(logprobs=True, top_logprobs=21), 400, param="top_logprobs")


async def test_bytes_that_are_half_a_character() -> None:
    found = await entries(says(b"\xf0\x9f", b"\x98", b"\x8a"))
    assert [entry["token"] for entry in found] == [r"\xf0", r"\x9f", r"\x98", r"\x8a"]
    assert joined(found).decode() == "😊"


async def test_half_a_character_at_the_very_end_has_entries_and_no_text() -> None:
    found = await entries(says("a", b"\xf0\x9f", finish=FinishReason.LENGTH))
    assert joined(found) == b"a\xf0\x9f"


async def test_the_end_of_the_sequence_is_no_part_of_the_text() -> None:
    found = await entries(Script([byte_ids("ab"), [END]]))
    assert [entry["token"] for entry in found] == ["a", "b"]
    found = await entries(Script([byte_ids("a"), [END], byte_ids("b")], finish=FinishReason.LENGTH))
    assert [(entry["token"], entry["bytes"]) for entry in found] == [("a", [97]), ("<|end|>", None), ("b", [98])]


async def test_a_token_of_which_a_stop_string_leaves_a_part() -> None:
    found = await entries(Script([[*byte_ids("x"), HELLO, *byte_ids("y")]]), stop="llo")
    assert [entry["token"] for entry in found] == ["x", "hello"]
    found = await entries(Script([[*byte_ids("x"), HELLO, *byte_ids("y")]]), stop="hello")
    assert [entry["token"] for entry in found] == ["x"]


async def test_entries_wait_for_text_that_is_held_back() -> None:
    made = api(says("a", "D", "E", "b", finish=FinishReason.LENGTH))
    read = read_stream((await made.post(logprobs=True, stream=True, stop="DEF")).content)
    shown = [(chunk["choices"][0]["delta"].get("content"), chunk["choices"][0]["logprobs"]) for chunk in read.chunks]
    texts = [(text, [entry["token"] for entry in logprobs["content"]]) for text, logprobs in shown if logprobs]
    assert texts == [("a", ["a"]), ("DEb", ["D", "E", "b"])]


@given(
    text=st.text(st.sampled_from("abDEF😊é"), max_size=12),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    stop=st.one_of(st.none(), st.sampled_from(["DEF", "ab", "😊D", "E"])),
)
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
async def test_the_entries_of_any_stream_are_its_text(text: str, cuts: list[int], stop: str | None) -> None:
    """One token a byte, bundled at random."""
    ids, steps = byte_ids(text), []
    while ids:
        size = cuts[len(steps) % len(cuts)]
        steps.append(ids[:size])
        ids = ids[size:]
    made = api(Script(steps, FinishReason.LENGTH))
    fields = {} if stop is None else {"stop": stop}
    read = read_stream((await made.post(logprobs=True, stream=True, **fields)).content)
    assert read.content == (text.split(stop)[0] if stop is not None else text)
    so_far, content = b"", ""
    for chunk in read.chunks:
        choice = chunk["choices"][0]
        so_far += joined((choice["logprobs"] or {"content": []})["content"])
        content += choice["delta"].get("content", "")
        assert so_far == content.encode()
