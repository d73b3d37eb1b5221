"""`response_format`: what reaches the engine, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from schemas.job import Grammar
from schemas.state import Capabilities
from services.text.grammar import KINDS
from tests.edge.fakes import Api, says

ALL = Capabilities(seed=True, grammar=KINDS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def api() -> Api:
    api = Api()
    api.jobs.capabilities = ALL
    api.jobs.default = says('{"a":1}')
    return api


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(kind="json_object")),
        (of_schema(SCHEMA, strict=True), Grammar(kind="json_schema", source=json.dumps(SCHEMA, separators=(",", ":")))),
        (of_schema({"enum": ["é"]}, description="d"), Grammar(kind="json_schema", source='{"enum":["\\u00e9"]}')),
        ({"type": "regex", "pattern": "[a-z]+"}, Grammar(kind="regex", source="[a-z]+")),
        ({"type": "grammar", "grammar": 'start: "a"'}, Grammar(kind="grammar", source='start: "a"')),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_reaches_the_engine(api: Api, given: Any, expected: Grammar | None, stream: bool) -> None:
    answer = await api.post(response_format=given, stream=stream)
    assert answer.status_code == 200
    assert api.jobs.draft.sampling.grammar == expected


MALFORMED: list[tuple[Any, str]] = [
    ("json_object", "response_format"),
    ({}, "response_format.type"),
    ({"type": None}, "response_format.type"),
    ({"type": ["text"]}, "response_format.type"),
    ({"type": "xml"}, "response_format.type"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}, "response_format.json_schema.schema"),
    (of_schema(SCHEMA, strict="yes"), "response_format.json_schema.strict"),
    ({"type": "regex"}, "response_format.pattern"),
    ({"type": "grammar", "grammar": 7}, "response_format.grammar"),
    (of_schema({"properties": {"foo": "bar"}}), "response_format"),
    (of_schema({"type": "string", "pattern": "(" * 10_000}), "response_format"),
    (of_schema({"$ref": "http://127.0.0.1:9/x.json"}), "response_format"),
    (of_schema({"enum": ["x" * 200_000]}), "response_format"),
    ({"type": "regex", "pattern": "(" * 10_000}, "response_format"),
    ({"type": "regex", "pattern": "(?<=x)*"}, "response_format"),
    ({"type": "grammar", "grammar": "start: nothing"}, "response_format"),
]


@pytest.mark.parametrize(("given", "param"), MALFORMED)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_refused_before_anything_is_sent(api: Api, given: Any, param: str, stream: bool) -> None:
    """Case 31."""
    answer = await api.post(response_format=given, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", param)
    assert len(error["message"]) < 400
    assert api.jobs.handles == []


async def test_a_schema_nested_as_deep_as_a_body_can_be(api: Api) -> None:
    deep = '{"properties":{"a":' * 20_000 + "{}" + "}}" * 20_000
    body = (
        '{"model":"tiny","messages":[{"role":"user","content":"hi"}],"response_format":'
        '{"type":"json_schema","json_schema":{"name":"x","schema":' + deep + "}}}"
    )
    answer = await api.post(body.encode())
    assert answer.status_code == 400
    assert (await api.post()).status_code == 200


async def test_half_a_surrogate_pair_is_no_pattern(api: Api) -> None:
    body = r'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"response_format":{"type":"regex","pattern":"\ud800"}}'
    answer = await api.post(body.encode())
    assert answer.status_code == 400


async def test_what_the_engine_cannot_do_is_refused_by_name(api: Api) -> None:
    api.jobs.capabilities = Capabilities(seed=True, grammar=("json_object",))
    assert (await api.post(response_format={"type": "json_object"})).status_code == 200
    error = (await api.post(response_format=of_schema(SCHEMA))).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "response_format")


async def test_a_schema_is_not_overlooked_where_other_servers_have_it(api: Api) -> None:
    error = (await api.post(response_format={"type": "json_object", "schema": SCHEMA})).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "response_format.schema")
    assert (await api.post(response_format={"type": "json_object", "schema": None})).status_code == 200


async def test_others_are_served_while_bad_ones_are_judged(api: Api) -> None:
    costly = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(1500)}}
    costly |= {"title": "{}"}
    bad = [api.post(response_format=of_schema(costly | {"title": str(number)})) for number in range(4)]
    answers = await asyncio.gather(*bad, *(api.post() for _ in range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4 + [200] * 4
