"""`response_format` through real processes: scripted engines draw at random among what a grammar allows."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.test_scripted import body, chat, streamed

LIST = {"type": "regex", "pattern": "(red|green|blue)(, (red|green|blue)){4,30}"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("arguments", [(), ("--both", "1")], ids=["apart", "both"])
async def test_answers_keep_to_their_formats(scripted_stack: StartScripted, arguments: tuple[str, ...]) -> None:
    up = scripted_stack(*arguments)
    asked = [chat(up, f"person {n}", response_format=PERSON, temperature=1, seed=n) for n in range(12)]
    for answer in await asyncio.gather(*asked):
        assert answer["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(content(answer)), SCHEMA)
    answer = await chat(up, "colours", response_format=LIST)
    assert re.fullmatch(LIST["pattern"], content(answer))
    assert await streamed(up, "colours", response_format=LIST) == content(answer)


async def test_stop_strings_and_limits_cut_a_constrained_answer(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    whole = content(await chat(up, "colours", response_format=LIST))
    second = whole.split(", ")[1]
    stopped = await chat(up, "colours", response_format=LIST, stop=[f", {second}"])
    assert content(stopped) == whole.partition(f", {second}")[0]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    cut = await chat(up, "colours", response_format=LIST, max_tokens=5)
    assert whole.startswith(content(cut))
    assert cut["choices"][0]["finish_reason"] == "length"


async def test_a_bad_schema_is_refused_and_everything_lives(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}}}
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        for stream in (True, False):
            answer = await client.post("/v1/chat/completions", json=body(response_format=bad, stream=stream))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "response_format"
    assert re.fullmatch(LIST["pattern"], content(await chat(up, "colours", response_format=LIST)))
