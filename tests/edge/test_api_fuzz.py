"""Any JSON in any field of any endpoint: an answer, or a refusal in the envelope; never a failure of ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.state import Capabilities
from services.edge.api.request import ChatRequest, CompletionRequest, GenerationRequest
from services.edge.api.tokens import DetokenizeRequest, TokenizeRequest
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api
from tests.edge.sse import read_stream

ALL = Capabilities(
    seed=True, n=True, logprobs=True, prompt_logprobs=True, penalties=True, top_k=True, min_p=True, logit_bias=True, grammar=KINDS
)
ENDPOINTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "hi"}),
    "/tokenize": (TokenizeRequest, {"model": MODEL}),
    "/detokenize": (DetokenizeRequest, {"model": MODEL, "tokens": [5]}),
}
WORDS = ["", "a", "hi", "<|end|>", "é🙂", "\0", "\ud800", "user", "assistant", "tool", "text", "f", "{}", "null", "5"]
KEYS = [
    *("role", "content", "type", "text", "name", "arguments", "function", "parameters", "strict", "tool_calls", "tool_call_id"),
    *("properties", "items", "required", "$ref", "pattern", "json_schema", "schema", "grammar", "include_usage", "5", "id"),
]
NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308, 2.0]),
    st.floats(allow_nan=True, allow_infinity=True),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(WORDS), st.text(max_size=4))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "bad name"])},
    optional={
        "description": LEAVES,
        "parameters": st.sampled_from([{"type": "object", "properties": {"a": {"type": "string"}}}, {"$ref": "#"}]) | JSON,
        "strict": st.booleans() | JSON,
    },
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
    optional={
        "content": st.sampled_from(["a", "", None, [{"type": "text", "text": "a"}]]) | JSON,
        "tool_calls": st.just([CALL]) | JSON,
        "tool_call_id": st.just("1") | JSON,
        "name": LEAVES,
        "x": JSON,
    },
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, max_size=4),
    "prompt": st.sampled_from(["hi", [5, 6], ["a", "b"], [[5], [6, 7]], ["a", [5]], [""], "é🙂", [10**30], [True]]),
    "tokens": st.lists(st.integers(0, 300), max_size=5),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=3),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.one_of(
        st.sampled_from([{"type": kind} for kind in ("text", "json_object", "json_schema", "regex", "grammar")]),
        st.fixed_dictionaries({"type": st.just("regex"), "pattern": st.sampled_from(["a+", "(", "(?<=x)*", "(" * 200]) | JSON}),
        st.fixed_dictionaries(
            {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"name": st.just("x"), "schema": JSON})}
        ),
    ),
    "stop": st.lists(st.sampled_from(["a", "l", "🙂", ""]), max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(["5", "6", "-1", "x", "9" * 30, "٣"]), NUMBERS, max_size=3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(0, 20),
    "modalities": st.just(["text"]),
    "stream": st.booleans(),
}


def _fields(kind: type[GenerationRequest]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to four fields of the endpoint, each with a value that it may well take, or with anything."""
    names = st.sampled_from(sorted(kind.model_fields))
    pairs = names.flatmap(lambda name: st.tuples(st.just(name), LIKELY.get(name, NUMBERS | st.booleans()) | JSON))
    return st.lists(pairs, max_size=4).map(dict)


BODIES = st.sampled_from(sorted(ENDPOINTS)).flatmap(
    lambda path: st.tuples(st.just(path), _fields(ENDPOINTS[path][0]).map(lambda fields: {**ENDPOINTS[path][1], **fields}))
)


@settings(max_examples=150)
@given(BODIES)
def test_any_body_is_answered_or_refused(request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    asyncio.run(_answered_or_refused(path, json.dumps(body).encode()))


@settings(max_examples=50)
@given(path=st.sampled_from(sorted(ENDPOINTS)), body=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_bodies_that_are_anything(path: str, body: bytes) -> None:
    asyncio.run(_answered_or_refused(path, body))


async def _answered_or_refused(path: str, body: bytes) -> None:
    api = Api()
    api.jobs.capabilities = ALL
    async with api.client() as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code != 200:
        _check_refusal(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        read = read_stream(response.content, usage=b'"usage"' in response.content)
        assert read.error is None
    else:
        assert "error" not in response.json()
    assert api.traffic.running == 0


def _check_refusal(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 8192
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["param"], str | None)
