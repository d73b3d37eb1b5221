"""Everything that is refused, and that it is refused in OpenAI's envelope."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from schemas.state import Capabilities
from tests.edge.fakes import MODEL, Api

USER = {"role": "user", "content": "hi"}


def check(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> None:
    """The envelope, whole."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


RAW = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b'{"model":"tiny"} x',
    b'{"temperature":NaN}',
    b'{"temperature":Infinity}',
    b'{"temperature":-Infinity}',
    b'{"temperature":1e400}',
    b'{"logit_bias":{"1":1e999}}',
    b'{"model":"\\ud800"}',
    b'{"model":"\\ud800\\u0041"}',
    b'{"model":"\xff"}',
    b"[" * 20_000 + b"]" * 20_000,
    b'{"a":' * 20_000,
    b'{"max_tokens":' + b"9" * 5_000 + b"}",
    '{"model":"tiny"}'.encode("utf-16"),
    b"\xef\xbb\xbf" + b'{"model":"tiny"}',
]


@pytest.mark.parametrize("body", RAW, ids=lambda body: repr(body[:24]))
async def test_bodies_that_are_no_json_object(body: bytes) -> None:
    """Cases 29 and B5; faults.md, gateway: NaN, 1e400, surrogate, UTF-16, depth 20k, 5,000-digit int."""
    check(await Api().post(body), 400)


async def test_a_key_that_stands_twice_is_refused() -> None:
    """faults.md, gateway: duplicate keys, wherever they stand and however they are spelled. In two objects they are none."""
    body = json.dumps({"model": MODEL, "messages": [USER, USER]}).encode()[:-1]
    api = Api()
    for more in (b',"max_tokens":5,"max_tokens":6}', b',"mod\\u0065l":"other"}', b',"metadata":{"a":"1","a":"1"}}'):
        refused = await api.post(body + more)
        check(refused, 400)
        assert "twice" in refused.json()["error"]["message"]
    assert (await api.post(body + b',"max_tokens":5}')).status_code == 200


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ([], "messages", "empty_array"),
        (None, "messages", "invalid_value"),
        ("hi", "messages", "invalid_value"),
        ({}, "messages", "invalid_value"),
        ([None], "messages[0]", None),
        ([{}], "messages[0].role", None),
        ([{"content": "a"}], "messages[0].role", None),
        ([{"role": ["user"], "content": "a"}], "messages[0].role", None),
        ([USER, {"role": "alien", "content": "a"}], "messages[1].role", None),
        ([{"role": "user"}], "messages[0].content", None),
        ([{"role": "user", "content": None}], "messages[0].content", None),
        ([{"role": "user", "content": 5}], "messages[0].content", None),
        ([{"role": "user", "content": []}], "messages[0].content", "empty_array"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", None),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", None),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name", None),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[1].type",
            "unsupported_parameter",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type", "unsupported_parameter"),
        ([USER, {"role": "assistant", "audio": {"id": "x"}}], "messages[1].audio", "unsupported_parameter"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "unsupported_parameter"),
    ],
)
async def test_messages(value: Any, param: str, code: str | None) -> None:
    """Case 23."""
    check(await Api().post(messages=value), 400, param=param, code=code)


async def test_no_messages_at_all() -> None:
    check(await Api().post({"model": MODEL}), 400, param="messages")
    check(await Api().post({"messages": [USER]}), 400, param="model")


WRONG: list[tuple[str, list[Any]]] = [
    ("model", [None, 5, ["tiny"]]),
    ("temperature", [-0.1, 2.1, 3, "1", True, [1]]),
    ("top_p", [0, 1.1, -1, "1", True]),
    ("max_tokens", [0, -1, 1.5, "5", True, 1.0]),
    ("max_completion_tokens", [0, -1, 1.5, "5", True]),
    ("min_tokens", [-1, "1", True, 10_000]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1", True]),
    ("n", [0, -1, 129, 10**30, "3", True, 1.0]),
    ("stop", ["", [""], ["a", ""], 5, [5], {"a": 1}, ["x"] * 17, "x" * 1025]),
    ("stream", ["true", 1, 0]),
    ("stream_options", [True, "x", {}, {"include_usage": True}]),
    ("stream_options.include_usage", ["yes"]),
    ("presence_penalty", [-2.1, 2.1, "1", True]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("logit_bias", [5, [1]]),
    ("logit_bias.5", [100.5, -101, 10**30, "1", True, None, {}, [1]]),
    ("store", ["yes", 1]),
    ("ignore_eos", ["true", 1]),
    ("logprobs", ["true", 1]),
    ("top_logprobs", [-1, 21, True]),
    ("tools", [{}, "x"]),
    ("response_format", ["text", []]),
]


@pytest.mark.parametrize(("param", "value"), [(param, value) for param, values in WRONG for value in values], ids=str)
async def test_wrong_values(param: str, value: Any) -> None:
    """Cases 9, 26, 29, 34 and B5: 400 that names the field, never a coercion."""
    name, _, inner = param.partition(".")
    api = Api()
    check(await api.post(**{name: {inner: value} if inner else value}), 400, param=param)
    assert api.jobs.handles == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"n": 16384}, "n"),
        ("/v1/chat/completions", {"n": 17}, "n"),
        ("/v1/chat/completions", {"n": 16, "max_tokens": 2**31}, "n"),
        ("/v1/completions", {"n": 16, "max_tokens": 2**31}, "n"),
        ("/v1/completions", {"best_of": 16384}, "best_of"),
        ("/v1/completions", {"prompt": ["x"] * 2048}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 2048, "n": 16}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 16, "n": 16}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 16, "n": 16, "max_tokens": 2**31}, "n"),
        ("/v1/completions", {"prompt": [[1]] * 2048, "n": 16, "best_of": 16}, "prompt"),
    ],
)
async def test_what_costs_too_much_reaches_no_engine(path: str, fields: dict[str, Any], param: str) -> None:
    """faults.md, gateway: n, best_of, 2,048 prompts x n, max_tokens 2^31: bounded together, before anything is published."""
    api = Api(max_generated_tokens=4096)
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    prompt = {"messages": [USER]} if "chat" in path else {"prompt": "x"}
    check(await api.call(path, **{**prompt, **fields}), 400, param=param)
    assert api.jobs.handles == []


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"x" * 100_000: 101}}, {"model": "x" * 100_000}, {"tool_choice": {"x" * 100_000: 1}}]
)
async def test_a_refusal_repeats_little_of_what_was_sent(fields: dict[str, Any]) -> None:
    response = await Api().post(**fields)
    assert response.status_code in (400, 404)
    assert len(response.content) < 2000


async def test_a_long_path_is_not_repeated() -> None:
    async with Api().client() as client:
        response = await client.get("/" + "x" * 10_000)
    check(response, 404)
    assert len(response.content) < 2000


UNSUPPORTED: list[tuple[str, Any]] = [
    ("functions", [{}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content"}),
    ("web_search_options", {}),
    ("logprobs", True),
    ("top_logprobs", 3),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("min_p", 0.1),
    ("top_k", 5),
    ("logit_bias", {"5": 1}),
]


@pytest.mark.parametrize(("param", "value"), UNSUPPORTED, ids=str)
async def test_what_the_engine_cannot_honour_is_refused_by_name(param: str, value: Any) -> None:
    check(await Api().post(**{param: value}), 400, param=param, code="unsupported_parameter")


async def test_what_the_engine_offers_is_honoured() -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, penalties=True, top_k=True, min_p=True, logit_bias=True)
    fields = {"presence_penalty": 1, "min_p": 0.25, "top_k": 4, "logit_bias": {"5": -100}, "repetition_penalty": 1.5}
    assert (await api.post(**fields)).status_code == 200
    sampling = api.jobs.draft.sampling
    assert (sampling.presence_penalty, sampling.min_p, sampling.top_k, sampling.logit_bias) == (1.0, 0.25, 4, {5: -100.0})
    for token in ("x", "-1", "1.5", "999999", "\u0661"):
        check(await api.post(logit_bias={token: 1}), 400, param="logit_bias")
    api.jobs.capabilities = Capabilities()
    check(await api.post(seed=1), 400, param="seed", code="unsupported_parameter")


async def test_models_that_are_not_there() -> None:
    api = Api()
    for name in ("gpt-4", "", "tiny\n", "x" * 5000, "hr.*.>"):
        check(await api.post(model=name), 404, param="model", code="model_not_found")
    api.jobs.served = False
    response = await api.post()
    check(response, 503, code="no_capacity")
    assert response.headers["retry-after"] == "3"
    api.jobs.connected = False
    check(await api.post(), 503, code="bus_unavailable")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("GET", "/metrics", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", "/v1/models/a/b", 404),
    ],
)
async def test_every_path(method: str, path: str, status: int) -> None:
    async with Api().client() as client:
        check(await client.request(method, path), status)


async def test_head_has_the_status_and_no_stack_trace() -> None:
    async with Api().client() as client:
        assert (await client.head("/v1/chat/completions")).status_code == 405


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=utf-16", 415),
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("Application/JSON", 200),
    ],
)
async def test_content_types(kind: str, status: int) -> None:
    body = json.dumps({"model": MODEL, "messages": [USER]})
    async with Api().client() as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": kind})
    if status == 200:
        assert response.status_code == 200
    else:
        check(response, status, code="unsupported_media_type")


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("Identity", 200)])
async def test_content_codings(coding: str, status: int) -> None:
    body = json.dumps({"model": MODEL, "messages": [USER]})
    async with Api().client() as client:
        headers = {"content-type": "application/json", "content-encoding": coding}
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == status
    if status != 200:
        check(response, status, code="unsupported_media_type")


async def test_bodies_that_are_too_large() -> None:
    api = Api(max_body_bytes=1000)

    async def parts() -> Any:
        for _ in range(100):
            yield b"x" * 100

    async with api.client() as client:
        headers = {"content-type": "application/json"}
        check(await client.post("/v1/chat/completions", content=b"x" * 1001, headers=headers), 413)
        check(await client.post("/v1/chat/completions", content=parts(), headers=headers), 413)


async def test_request_ids() -> None:
    async with Api().client() as client:
        for sent, returned in (("abc-1_2.3", "abc-1_2.3"), ("x" * 128, "x" * 128), ("x" * 129, "req-made"), ("a b", "req-made")):
            response = await client.get("/health", headers={"x-request-id": sent})
            assert response.headers["x-request-id"] == returned


async def test_models() -> None:
    api = Api()
    async with api.client() as client:
        card = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "headrace"}
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await client.get(f"/v1/models/{MODEL}")).json() == card
        api.jobs.served = False
        assert (await client.get("/v1/models")).json()["data"] == []
        assert "/v1/chat/completions" in (await client.get("/openapi.json")).json()["paths"]


async def test_draining_refuses_new_work_only() -> None:
    api = Api()
    api.traffic.draining = True
    check(await api.post(), 503, code="no_capacity")
    assert api.traffic.running == 0


async def test_the_openapi_document_lists_every_endpoint_with_its_body() -> None:
    api = Api()
    async with api.client() as client:
        document = (await client.get("/openapi.json")).json()
    served = {
        (route.path.replace(":path", ""), method.lower()) for route in api.app.routes for method in getattr(route, "methods", ())
    }
    shown = {(path, method) for path, methods in document["paths"].items() for method in methods}
    internal = {"/docs", "/docs/oauth2-redirect", "/openapi.json"}
    assert {(path, method) for path, method in served if path not in internal and method != "head"} == shown
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            content = about.get("requestBody", {}).get("content", {})
            assert method != "post" or path.endswith("/cancel") or "example" in content["application/json"]["schema"], path
