"""`auto`: what it picks for which request, and the hints that decide before it looks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.edge.selection.rig import CODE, TOOL, api, chosen, sdk, user


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        (user("hi"), "a", "auto; size=small; rule=default"),
        (user("x" * 199), "a", "auto; size=small; rule=default"),
        (user("x" * 200), "c", "auto; size=large; rule=length"),
        (user("hi", "and?", "so?"), "b", "auto; size=medium; rule=depth"),
        (user(CODE), "c", "auto; size=large; rule=code"),
        ({**user("hi"), "tools": [TOOL]}, "b", "auto; size=medium; rule=tools"),
        ({**user("hi"), "tools": [TOOL], "tool_choice": "none"}, "a", "auto; size=small; rule=default"),
        ({**user("hi"), "metadata": {"headrace_hint": "legal"}}, "c", "auto; size=large; rule=hint"),
        ({**user(CODE), "metadata": {"headrace_hint": "small"}}, "a", "auto; size=small; rule=hint"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": CODE}]}]}, "c", "auto; size=large; rule=code"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "chat"])
async def test_auto(name: str, body: dict[str, Any], model: str, reason: str) -> None:
    edge = api()
    response = await edge.call("/v1/chat/completions", model=name, **body)
    assert response.status_code == 200
    assert response.json()["model"] == model
    assert chosen(response) == (model, reason)


async def test_a_hint_in_a_header_counts_more_than_one_in_the_body() -> None:
    edge = api()
    async with sdk(edge) as client:
        answer = await client.chat.completions.with_raw_response.create(
            model="auto",
            messages=[{"role": "user", "content": "hi"}],
            metadata={"headrace_hint": "large"},
            extra_headers={"x-headrace-hint": "Medium"},
        )
    assert answer.headers["x-headrace-model"] == answer.parse().model == "b"


@pytest.mark.parametrize("hint", ["nonsense", 7, ["small"]])
async def test_a_hint_that_nobody_knows_is_refused_by_auto_only(hint: Any) -> None:
    edge = api()
    refused = await edge.post(model="auto", messages=user("hi")["messages"], metadata={"headrace_hint": hint})
    assert refused.status_code == 400
    assert "hint" in refused.json()["error"]["param"]
    assert (await edge.call("/v1/chat/completions", model="a", **user("hi"), metadata={"headrace_hint": hint})).status_code == 200


async def test_auto_of_raw_prompts() -> None:
    edge = api()
    assert chosen(await edge.call("/v1/completions", model="auto", prompt="hi"))[0] == "a"
    assert chosen(await edge.call("/v1/completions", model="auto", prompt=["x" * 150, "y" * 50]))[0] == "c"
    for body in ({"prompt": [1, 2]}, {"prompt": "hi", "logit_bias": {"5": 1}}):
        refused = await edge.call("/v1/completions", model="auto", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_tokens_of_whoever_would_answer() -> None:
    edge = api()
    edge.jobs.alive = set()
    assert chosen(await edge.call("/tokenize", model="auto", prompt=CODE))[0] == "c"
    assert chosen(await edge.call("/tokenize", model="fast", **user("hi")))[0] == "a"
    assert chosen(await edge.call("/detokenize", model="fast", tokens=[40]))[0] == "a"
    assert (await edge.call("/detokenize", model="auto", tokens=[40])).status_code == 400


async def test_a_stream_says_it_in_its_first_bytes_and_its_chunks() -> None:
    response = await api().call("/v1/chat/completions", model="auto", stream=True, **user(CODE))
    assert chosen(response) == ("c", "auto; size=large; rule=code")
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"c"}
