"""Chat completions, streamed and whole, over scripted jobs."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InternalError, JobFailed, Overloaded, PayloadTooLarge
from schemas.job import unpack_ids
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.api.form import KEEP_ALIVE
from services.edge.jobs.draft import Delta
from tests.edge.fakes import CONTEXT, MODEL, Api, Script, says
from tests.edge.sse import read_stream
from tests.edge.test_http import served
from tests.text.tiny import byte_ids, tiny_prompts
from tests.waiting import PATIENCE_S


async def both(api: Api, script: Script, **fields: object) -> tuple[str, str, int]:
    """Content, finish and completion tokens: the same streamed and whole."""
    api.jobs.scripts = [script, script]
    whole = (await api.post(**fields)).json()
    streamed = await api.post(stream=True, stream_options={"include_usage": True}, **fields)
    read = read_stream(streamed.content, usage=True)
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": read.content, "refusal": None}
    assert choice["finish_reason"] == read.finish
    assert whole["usage"] == read.usage
    return read.content, str(read.finish), whole["usage"]["completion_tokens"]


async def test_whole() -> None:
    api = Api()
    api.jobs.default = says("hel", "lo")
    response = await api.post()
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"] == f"chatcmpl-{api.jobs.handles[0].id}"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = tiny_prompts().encode([{"role": "user", "content": "hi"}])
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert unpack_ids(api.jobs.draft.prompt) == prompt
    assert not api.jobs.handles[0].cancelled.is_set()


async def test_stream_headers() -> None:
    response = await Api().post(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "req-made"


async def test_usage_only_when_asked_for() -> None:
    """Case 17: unasked no chunk lacks choices; asked for it is the last chunk, and the others say null. It is billed anyway."""
    api = Api()
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        read = read_stream((await api.post(stream=True, stream_options=options)).content)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in read.chunks)
    *chunks, last = read_stream((await api.post(stream=True, stream_options={"include_usage": True})).content, usage=True).chunks
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert (await api.post()).status_code == 200
    assert await api.budgets.flush()
    assert [entry.used.completion_tokens for entry in api.usage.entries.values()] == [5] * 6


async def test_a_finish_is_null_until_the_end_and_the_role_comes_once() -> None:
    """Case 13: of each choice."""
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    steps = [[Delta(0, byte_ids("a")), Delta(1, byte_ids("b"))], [Delta(1, byte_ids("c"))]]
    ends = [[Delta(1, [], FinishReason.STOP)], [Delta(0, byte_ids("d"), FinishReason.LENGTH)]]
    api.jobs.default = Script([], None, deltas=[*steps, *ends])
    chunks = read_stream((await api.post(stream=True, n=2)).content).chunks
    for index, finish in ((0, "length"), (1, "stop")):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)


async def test_a_character_split_over_tokens() -> None:
    """Case 1."""
    content, _, tokens = await both(Api(), says(b"\xf0\x9f", b"\x98", b"\x8a", "!"))
    assert (content, tokens) == ("😊!", 5)


async def test_max_tokens_cuts_a_character() -> None:
    """Case 2: both agree, and nothing stands for the half that came."""
    result = await both(Api(), says("ab", b"\xf0\x9f", finish=FinishReason.LENGTH), max_tokens=4)
    assert result == ("ab", "length", 4)


@pytest.mark.parametrize(("last", "content", "finish"), [("J", "", "stop"), ("x", "DEFGHIx", "length")])
async def test_a_stop_string_never_leaks(last: str, content: str, finish: str) -> None:
    """Case 4: held back until sure, released when it was none."""
    api = Api()
    script = says("DEF", "G", "HI", last, finish=FinishReason.LENGTH)
    assert await both(api, script, stop=["DEFGHIJ"]) == (content, finish, 7)


async def test_a_stop_string_stops_the_job_and_counts_what_was_generated() -> None:
    api = Api()
    script = says("one STOP two", finish=None)
    assert await both(api, script, stop="STOP") == ("one ", "stop", len("one STOP"))
    assert all(handle.cancelled.is_set() for handle in api.jobs.handles)


async def test_no_empty_deltas_while_text_is_held_back() -> None:
    """Case 10; the reader refuses empty deltas."""
    read = read_stream((await Api().post(stream=True, stop=["zzz"])).content)
    assert read.content == "hello"


async def test_a_finish_without_tokens() -> None:
    """Case 11."""
    script = says("a", finish=FinishReason.LENGTH)
    script.finish_with_last = False
    assert await both(Api(), script, max_tokens=1) == ("a", "length", 1)


async def test_nothing_generated() -> None:
    assert await both(Api(), Script([])) == ("", "stop", 0)


async def test_refused_before_the_first_byte_is_a_status() -> None:
    """Case 20."""
    api = Api()
    for stream in (True, False):
        api.jobs.scripts = [Script(refuse=Overloaded("The queue is full.", retry_after=6.2))]
        response = await api.post(stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        assert response.json()["error"] == {
            "message": "The queue is full.",
            "type": "server_error",
            "param": None,
            "code": "overloaded",
        }
        assert response.headers["content-type"] == "application/json"
    api.jobs.scripts = [Script(refuse=PayloadTooLarge("too large"))]
    assert (await api.post()).status_code == 413
    api.jobs.scripts = [Script(error=Overloaded("The engine ended."))]
    assert (await api.post()).headers["retry-after"] == "1"


async def test_a_failure_after_the_first_byte_is_an_event_and_then_done() -> None:
    api = Api()
    failing = says("abc")
    failing.error = JobFailed("The model failed on this request.")
    api.jobs.scripts = [failing, failing]
    streamed = await api.post(stream=True)
    read = read_stream(streamed.content)
    assert read.error == {
        "message": "The model failed on this request.",
        "type": "server_error",
        "param": None,
        "code": "job_failed",
    }
    assert read.content == "abc"
    whole = await api.post()
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "job_failed"


async def test_a_bug_is_500_with_a_fixed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    script = says("abc")
    script.error = InternalError("The servers that worked on this request failed.")
    api.jobs.scripts = [script]
    assert (await api.post()).json()["error"]["code"] == "internal_error"
    monkeypatch.setattr(api.jobs, "start", lambda _: 1 / 0)
    response = await api.post()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal error. Please report request id req-made."
    assert response.headers["x-request-id"] == "req-made"


async def test_keep_alive_while_nothing_comes() -> None:
    """Case 22."""
    api = Api(keep_alive_s=0.02)
    go = asyncio.Event()
    script = says("hello")
    script.go = go
    api.jobs.scripts = [script]
    body, data = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}, b""
    async with (
        served(api) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for part in response.aiter_bytes():
            data += part
            if data.count(KEEP_ALIVE) >= 2:
                go.set()
    read = read_stream(data)
    assert read.comments >= 2
    assert read.content == "hello"


async def test_parameters_reach_the_job() -> None:
    api = Api()
    await api.post(temperature=0, top_p=0.5, seed=-1, max_tokens=7, max_completion_tokens=5, ignore_eos=True, min_tokens=2)
    sampling = api.jobs.draft.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 2**64 - 1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (5, 2, True)
    await api.post()
    first = api.jobs.draft.sampling
    await api.post()
    assert first.seed != api.jobs.draft.sampling.seed
    assert (first.temperature, first.top_p, first.ignore_eos) == (1.0, 1.0, False)


@pytest.mark.parametrize("asked", [65535, 2**63, 10**400])
async def test_max_tokens_is_clamped_to_the_context(asked: int) -> None:
    """Case 26."""
    api = Api()
    response = await api.post(max_tokens=asked)
    assert response.status_code == 200
    assert api.jobs.draft.sampling.max_tokens == CONTEXT - response.json()["usage"]["prompt_tokens"]


async def test_a_long_prompt_is_encoded_beside_the_loop() -> None:
    api = Api()
    response = await api.post(messages=[{"role": "user", "content": "hello " * 2000}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_message_shapes_that_are_fine() -> None:
    """Case 24 and text parts."""
    api = Api()
    user = {"role": "user", "content": "A"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages in (
        [user, {"role": "assistant", "content": ""}, user],
        [
            user,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "B"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}],
        [{"role": "developer", "content": "A"}, {"role": "system", "content": "A", "name": None}, user],
    ):
        assert (await api.post(messages=messages)).status_code == 200, messages


async def test_what_the_model_refused_to_say_is_part_of_the_chat() -> None:
    """In OpenAI's messages `refusal` stands where the content would."""
    api = Api()
    user, no = {"role": "user", "content": "A"}, "No."
    part = {"type": "refusal", "refusal": no}
    forms = ({"content": no}, {"refusal": no}, {"content": None, "refusal": no}, {"content": [part]})
    prompts = set()
    for said in (*forms, {"content": no, "refusal": None}):
        assert (await api.post(messages=[user, {"role": "assistant", **said}, user])).status_code == 200
        prompts.add(api.jobs.draft.prompt)
    assert len(prompts) == 1


async def test_null_is_absent() -> None:
    """Case 27."""
    names = [
        *("tool_choice", "tools", "response_format", "logit_bias", "stream_options", "stop", "n", "seed", "temperature"),
        *("top_p", "max_tokens", "max_completion_tokens", "stream", "user", "metadata", "logprobs", "top_logprobs"),
        *("presence_penalty", "frequency_penalty", "functions", "modalities", "audio", "store", "service_tier"),
    ]
    for name in names:
        assert (await Api().post(**{name: None})).status_code == 200, name
    harmless = {"tools": [], "logit_bias": {}, "stop": [], "n": 1, "presence_penalty": 0, "unheard_of": {"a": 1}}
    assert (await Api().post(**harmless, response_format={"type": "text"}, user="u", metadata={"a": "b"})).status_code == 200


TEXTS = st.text(alphabet='ab🙂é\n"\\\u2028', max_size=12)


@settings(max_examples=60)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.sampled_from(["a", "ab", "ba", "🙂", "aab", "\n"]), max_size=3, unique=True),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    apart=st.booleans(),
)
def test_stream_invariants(text: str, cuts: list[int], stops: list[str], finish: FinishReason, apart: bool) -> None:
    """Any tokens, any bundling, any stops: the stream keeps its rules and says what the whole answer says."""
    ids = byte_ids(text)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    steps = [ids[start:end] for start, end in pairwise(edges)]
    script = Script(steps, finish, finish_with_last=not apart)
    content, _, tokens = asyncio.run(both(Api(), script, stop=stops or None))
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        assert (content, tokens) == (text, len(ids))
    else:
        assert text.startswith(content)
        assert not any(stop in content for stop in stops)
        assert tokens <= len(ids)
