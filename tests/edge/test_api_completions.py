"""POST /v1/completions over scripted jobs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.errors import Overloaded
from schemas.job import unpack_ids
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.api.completion_form import CompletionForm
from services.edge.api.form import Said
from services.edge.api.logprobs import Entry
from services.edge.jobs.draft import Delta
from tests.edge.fakes import CONTEXT, MODEL, Api, Script, says
from tests.edge.sse import events
from tests.text.tiny import CONFIG, byte_ids, tiny_tokenizer

PATH = "/v1/completions"


def chunks(data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream; the end is checked."""
    blocks = [block for block in events(data) if not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def joined(read: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    """By choice: its text and its finish, which comes last and once."""
    said: dict[int, tuple[str, str | None]] = {}
    for chunk in read:
        for choice in chunk["choices"]:
            text, finish = said.get(choice["index"], ("", None))
            assert finish is None
            said[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return said


async def test_whole() -> None:
    api = Api()
    api.jobs.default = says("hel", "lo")
    body = (await api.call(PATH, prompt="say ")).json()
    assert body["object"] == "text_completion"
    assert body["id"] == f"cmpl-{api.jobs.handles[0].id}"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert unpack_ids(api.jobs.draft.prompt) == byte_ids("say ")
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 5
    assert api.jobs.draft.sampling.max_tokens == 16


@pytest.mark.parametrize("fields", [{}, {"stop": "llo"}, {"echo": True}, {"echo": True, "stop": ["lo"]}])
async def test_streamed_and_whole_say_the_same(fields: dict[str, Any]) -> None:
    api = Api()
    api.jobs.default = says("hel", "lo", b"\xf0\x9f", b"\x98\x8a")
    (whole,) = (await api.call(PATH, prompt="say ", **fields)).json()["choices"]
    read = chunks((await api.call(PATH, prompt="say ", stream=True, **fields)).content)
    assert joined(read) == {0: (whole["text"], whole["finish_reason"])}
    assert all(chunk["object"] == "text_completion" for chunk in read)
    assert all("usage" not in chunk for chunk in read)


async def test_usage_of_a_stream_only_when_asked_for() -> None:
    read = chunks((await Api().call(PATH, prompt="x", stream=True, stream_options={"include_usage": True})).content)
    assert all(chunk["usage"] is None for chunk in read[:-1])
    assert read[-1]["choices"] == []
    assert read[-1]["usage"]["total_tokens"] == 6


async def test_several_prompts_and_choices_are_numbered_in_order() -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    texts = [["a", "b"], ["c", "d"]]
    for prompt in texts:
        both = [[(choice, text) for choice, text in enumerate(prompt)]]
        api.jobs.scripts.append(_choices(both))
    body = (await api.call(PATH, prompt=["one", "two"], n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert [unpack_ids(handle.draft.prompt) for handle in api.jobs.handles] == [byte_ids("one"), byte_ids("two")]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 4


async def test_several_prompts_streamed() -> None:
    api = Api()
    api.jobs.scripts = [says("a", "bc"), says("d"), says("e", "f", "g")]
    read = chunks((await api.call(PATH, prompt=["1", "2", "3"], stream=True)).content)
    assert joined(read) == {0: ("abc", "stop"), 1: ("d", "stop"), 2: ("efg", "stop")}


async def test_one_refused_prompt_refuses_the_request_and_cancels_the_others() -> None:
    api = Api()
    api.jobs.scripts = [Script(finish=None), Script(refuse=Overloaded("full", retry_after=2.0))]
    response = await api.call(PATH, prompt=["1", "2"], stream=True)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert api.jobs.handles[0].cancelled.is_set()


async def test_one_failed_prompt_ends_the_stream() -> None:
    api = Api()
    api.jobs.scripts = [Script(finish=None), Script([byte_ids("x")], error=Overloaded("gone", retry_after=2.0))]
    read = chunks((await api.call(PATH, prompt=["1", "2"], stream=True)).content)
    assert read[-1]["error"]["message"] == "gone"
    assert api.jobs.handles[0].cancelled.is_set()


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_token_ids(prompt: list[Any]) -> None:
    api = Api()
    body = (await api.call(PATH, prompt=prompt, echo=True)).json()
    assert unpack_ids(api.jobs.draft.prompt) == [5, 6, 7]
    assert body["choices"][0]["text"] == tiny_tokenizer().decode([5, 6, 7]) + "hello"


async def test_special_tokens_of_a_raw_prompt_are_such_and_are_echoed() -> None:
    api = Api()
    body = (await api.call(PATH, prompt="<|user|>hi", echo=True)).json()
    assert unpack_ids(api.jobs.draft.prompt) == [1, *byte_ids("hi")]
    assert body["choices"][0]["text"] == "<|user|>hihello"


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_behind_a_character_that_was_broken_off(echo: bool) -> None:
    """Its U+FFFD comes with the next token's text, and is not that token's."""
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True, prompt_logprobs=True)
    api.jobs.default = says(b"\xf0\x9f", b"ab", b"\xf0", b"\xc3\xa9", b"c")
    prompt = [*byte_ids("x"), *byte_ids(b"\xc3"), *byte_ids("y")] if echo else "x"
    (choice,) = (await api.call(PATH, prompt=prompt, echo=echo, logprobs=0)).json()["choices"]
    before = "x\ufffdy" if echo else ""
    assert choice["text"] == before + "\ufffdab\ufffdéc"
    offsets = [len(before) + offset for offset in (0, 0, 1, 2, 3, 4, 4, 5)]
    assert choice["logprobs"]["text_offset"] == [*range(len(before)), *offsets]


async def test_logprobs_in_the_older_form() -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True)
    api.jobs.default = says("ab", "c")
    (choice,) = (await api.call(PATH, prompt="x", logprobs=2)).json()["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "b", "c"]
    assert told["text_offset"] == [0, 1, 2]
    assert told["token_logprobs"] == [-token / 1000 for token in byte_ids("abc")]
    assert [list(top) for top in told["top_logprobs"]] == [["a", "b"], ["b", "c"], ["c", "d"]]  # the token is the likeliest
    streamed = chunks((await api.call(PATH, prompt="x", logprobs=2, stream=True)).content)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert {name: [item for part in parts for item in part[name]] for name in told} == told


@pytest.mark.parametrize(
    ("top", "told"),
    [
        ([], {"a": -3.0}),
        ([("b", -1.0)], {"b": -1.0, "a": -3.0}),
        ([("b", -1.0), ("a", -3.0)], {"b": -1.0, "a": -3.0}),
        ([("b", -1.0), ("b", -2.0)], {"b": -1.0, "a": -3.0}),
    ],
)
def test_the_alternatives_include_the_token_itself(top: list[tuple[str, float]], told: dict[str, float]) -> None:
    """One more than was asked for, where it is not among them. Two tokens may be spelled alike: the likelier one counts."""
    fields = {"token": "a", "logprob": -3.0, "top_logprobs": [{"token": token, "logprob": value} for token, value in top]}
    form = CompletionForm("cmpl-1", 0, MODEL, usage=False, echoes={})
    columns = form.choice(0, Said("a", "stop", [Entry(0, 1, fields)]))["logprobs"]
    assert columns["top_logprobs"] == [told]
    assert list(columns["top_logprobs"][0]) == list(told)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [5, True]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": [CONFIG["vocab_size"]]}, "prompt[0]"),
        ({"prompt": [[5, 10**30]]}, "prompt[0][1]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 2}, "prompt"),
        ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "best_of": 0}, "best_of"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True, n=True)
    response = await api.call(PATH, **fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
    assert not api.jobs.handles


async def test_null_is_absent() -> None:
    names = ("suffix", "best_of", "echo", "logprobs", "stop", "n", "seed", "stream", "stream_options", "max_tokens", "user")
    response = await Api().call(PATH, prompt="x", **dict.fromkeys(names))
    assert response.status_code == 200
    assert response.json()["model"] == MODEL


def _choices(steps: list[list[tuple[int, str]]]) -> Script:
    return Script(deltas=[[Delta(choice, byte_ids(text), FinishReason.STOP) for choice, text in step] for step in steps])
