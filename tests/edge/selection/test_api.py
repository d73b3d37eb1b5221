"""Several models behind one edge: which one answers, what the caller is told of it, and who answers in another's place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from schemas.errors import (
    HeadraceError,
    JobFailed,
    ModelLoading,
    Overloaded,
    RateLimited,
    Unavailable,
)
from schemas.state import Capabilities
from services.edge.gate.limits import Limits
from services.settings.selection import SelectionSettings
from services.settings.selection_check import check_selection
from tests.edge.fakes import Api, Script, says
from tests.edge.sse import read_stream

MODELS = ("a", "b", "c")
SELECTION = SelectionSettings.model_validate(
    {
        "aliases": {"fast": "a", "chat": "auto"},
        "auto": {
            "small": "fast",
            "medium": "b",
            "large": "c",
            "rules": [
                {"use": "large", "hint": "legal"},
                {"use": "large", "code": True},
                {"use": "large", "min_characters": 200},
                {"use": "medium", "min_turns": 3},
                {"use": "medium", "tools": True},
            ],
        },
        "fallback": {"c": {"to": ["b", "fast"]}},
    }
)
check_selection(SELECTION, MODELS)
CODE = "Why does this fail?\n```\nprint(1/0)\n```"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ANSWERS: Any = ["/v1/chat/completions", "/v1/completions"]


def api(**settings: Any) -> Api:
    return Api(MODELS, SELECTION, **settings)


def user(*texts: str) -> dict[str, Any]:
    """A conversation with so many turns."""
    messages = [message for text in texts for message in (said("user", text), said("assistant", "ok"))]
    return {"messages": messages[:-1]}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def chosen(response: httpx.Response) -> tuple[str | None, str | None]:
    return response.headers.get("x-headrace-model"), response.headers.get("x-headrace-model-reason")


@asynccontextmanager
async def sdk(api: Api, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(api.app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://edge/v1", api_key=key, http_client=http, max_retries=0) as client,
    ):
        yield client


# names


async def test_each_model_has_its_own_text() -> None:
    edge = api()
    for at, model in enumerate(MODELS):
        response = await edge.post(model=model)
        assert response.json()["model"] == model
        assert chosen(response) == (model, "named")
        assert (edge.jobs.draft.model, edge.jobs.draft.sampling.temperature) == (model, 1 - at / 10)


async def test_an_alias_is_answered_by_its_model() -> None:
    edge = api()
    response = await edge.post(model="fast")
    assert response.json()["model"] == edge.jobs.draft.model == "a"
    assert chosen(response) == ("a", "alias")
    assert (await edge.post(model="slow")).json()["error"]["code"] == "model_not_found"


async def test_one_model_without_a_selection_is_what_it_was() -> None:
    edge = Api()
    assert chosen(await edge.post()) == ("tiny", "named")
    assert (await edge.post(model="auto")).status_code == 404


async def test_what_is_listed() -> None:
    edge = api()
    edge.jobs.alive = {"a", "b"}
    async with sdk(edge) as client:
        listed = {model.id: model for model in (await client.models.list()).data}
        assert list(listed) == ["a", "b", "c", "fast", "chat", "auto"]  # others answer for c
        assert getattr(listed["fast"], "root", None) == "a"
        assert (await client.models.retrieve("auto")).id == "auto"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("slow")


# auto


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


# fallback


def metrics(edge: Api) -> list[str]:
    return [line for line in edge.metrics.prometheus_text().decode().splitlines() if line.startswith("headrace_model_fallbacks")]


@pytest.mark.parametrize(
    ("refusal", "reason"), [(Unavailable("x"), "no_capacity"), (Overloaded("x"), "no_capacity"), (ModelLoading("x"), "no_worker")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_model_answers_before_the_first_byte(refusal: HeadraceError, reason: str, stream: bool) -> None:
    edge = api()
    edge.jobs.scripts = [Script(refuse=refusal), says("from b")]
    response = await edge.post(model="c", messages=user("hi")["messages"], stream=stream)
    assert response.status_code == 200
    assert chosen(response) == ("b", "named")
    assert response.headers["x-headrace-fallback"] == f"c; reason={reason}"
    text = read_stream(response.content).content if stream else response.json()["choices"][0]["message"]["content"]
    assert text == "from b"
    assert [handle.draft.model for handle in edge.jobs.handles] == ["c", "b"]
    assert metrics(edge) == [f'headrace_model_fallbacks_total{{model="c",reason="{reason}",to="b"}} 1.0']


async def test_models_without_workers_are_not_even_asked() -> None:
    edge = api()
    edge.jobs.alive = {"a"}
    response = await edge.post(model="c")
    assert response.json()["model"] == "a"
    assert response.headers["x-headrace-fallback"] == "c; reason=no_worker, b; reason=no_worker"
    assert len(edge.jobs.handles) == 1


async def test_a_model_without_workers_is_not_one_without_capacity() -> None:
    selection = SelectionSettings.model_validate({"fallback": {"c": {"to": ["a"], "on": ["no_capacity"]}}})
    edge = Api(MODELS, selection)
    edge.jobs.alive = {"a"}
    response = await edge.post(model="c")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")
    assert chosen(response) == ("c", "named")
    assert not edge.jobs.handles


async def test_who_is_not_needed_is_not_passed_over() -> None:
    edge = api()
    edge.jobs.alive = {"c", "a"}
    response = await edge.post(model="c")
    assert response.json()["model"] == "c"
    assert "x-headrace-fallback" not in response.headers
    edge.jobs.scripts = [Script(refuse=Unavailable("x"))]
    response = await edge.post(model="c")
    assert response.headers["x-headrace-fallback"] == "c; reason=no_capacity, b; reason=no_worker"


async def test_a_prompt_too_long_for_one() -> None:
    edge = api()
    edge.jobs.contexts = {"c": 8, "b": 8}
    response = await edge.post(model="c", messages=user("x" * 100)["messages"])
    assert response.json()["model"] == "a"
    assert response.headers["x-headrace-fallback"] == "c; reason=context_length, b; reason=context_length"


async def test_what_auto_picked_falls_back_too() -> None:
    edge = api()
    edge.jobs.alive = {"a", "b"}
    response = await edge.post(model="auto", messages=user(CODE)["messages"])
    assert chosen(response) == ("b", "auto; size=large; rule=code")
    assert response.headers["x-headrace-fallback"] == "c; reason=no_worker"


async def test_nobody_answers_in_the_place_of_a_model_that_has_no_policy() -> None:
    edge = api()
    edge.jobs.alive = {"a", "c"}
    refused = await edge.post(model="b")
    assert (refused.status_code, chosen(refused)[0]) == (503, "b")
    edge.jobs.scripts = [Script(refuse=Overloaded("full", retry_after=9))]
    refused = await edge.post(model="a")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "9")
    assert metrics(edge) == []


async def test_the_caller_s_own_limits_are_no_reason() -> None:
    edge = api()
    key = edge.keys.make(limits=Limits(requests_per_minute=1))
    async with sdk(edge, key) as client:
        ask = client.chat.completions.with_raw_response.create
        edge.jobs.scripts = [Script(refuse=Unavailable("x")), says("ok")]
        first = await ask(model="c", messages=[{"role": "user", "content": "hi"}])  # both tries count once
        assert (first.headers["x-headrace-model"], first.headers["x-ratelimit-remaining-requests"]) == ("b", "0")
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(model="c", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.response.headers["x-headrace-model"] == "c"
    assert "x-headrace-fallback" not in refused.value.response.headers


async def test_a_router_s_429_is_none_either() -> None:
    edge = api()
    edge.jobs.scripts = [Script(refuse=RateLimited("over your share", retry_after=2))]
    assert (await edge.post(model="c")).status_code == 429
    assert len(edge.jobs.handles) == 1


async def test_limits_that_cannot_be_checked_are_none() -> None:
    edge = api()
    key = edge.keys.make(limits=Limits(requests_per_minute=5))
    edge.counters.down = True
    async with sdk(edge, key) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="c", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.status_code == 503
    assert "x-headrace-fallback" not in refused.value.response.headers


async def test_nothing_falls_back_after_the_first_byte() -> None:
    edge = api()
    edge.jobs.scripts = [Script([[40]], error=Unavailable("gone"))]
    response = await edge.post(model="c", messages=user("hi")["messages"], stream=True)
    assert (response.status_code, chosen(response)[0]) == (200, "c")
    assert '"code":"no_capacity"' in response.text
    assert len(edge.jobs.handles) == 1


@pytest.mark.parametrize("error", [JobFailed("x")])
async def test_a_failure_is_no_refusal(error: HeadraceError) -> None:
    edge = api()
    edge.jobs.scripts = [Script(refuse=error)]
    assert (await edge.post(model="c")).status_code == 500
    assert len(edge.jobs.handles) == 1


async def test_when_all_refuse_the_caller_hears_who_may_take_it_later() -> None:
    edge = api()
    edge.jobs.contexts = {"c": 8}
    edge.jobs.scripts = [Script(refuse=Overloaded("full", retry_after=4)), Script(refuse=Unavailable("none", retry_after=7))]
    refused = await edge.post(model="c", messages=user("x" * 50)["messages"])
    assert (refused.status_code, refused.headers["retry-after"], chosen(refused)[0]) == (503, "4", "b")
    assert refused.headers["x-headrace-fallback"] == "c; reason=context_length, b; reason=no_capacity, a; reason=no_capacity"
    assert metrics(edge) == []


async def test_a_stand_in_that_cannot_do_it_is_passed_over() -> None:
    edge = api()
    prompt = (await edge.call("/tokenize", model="b", **user("hi"))).json()["count"]
    edge.jobs.contexts = {"b": prompt + 10}
    edge.jobs.scripts = [Script(refuse=Unavailable("x"))]
    response = await edge.post(model="c", messages=user("hi")["messages"], min_tokens=30)
    assert response.json()["model"] == "a"
    assert response.headers["x-headrace-fallback"] == "c; reason=no_capacity, b; reason=unsuited"


async def test_token_ids_do_not_move_to_another_model() -> None:
    edge = api()
    edge.jobs.scripts = [Script(refuse=Unavailable("x"))]
    assert (await edge.call("/v1/completions", model="c", prompt=[1, 2, 3])).status_code == 503
    assert len(edge.jobs.handles) == 1


async def test_all_tries_share_one_deadline_and_only_the_last_waits_for_a_worker() -> None:
    edge = api(queue_deadline_s=5, first_token_deadline_s=6, total_deadline_s=7)
    edge.jobs.scripts = [Script(refuse=Unavailable("x")), Script(refuse=Unavailable("x")), says("ok")]
    assert (await edge.post(model="c")).json()["model"] == "a"
    drafts = [handle.draft for handle in edge.jobs.handles]
    assert [draft.elsewhere for draft in drafts] == [True, True, False]
    for one in ("queue_s", "first_token_s", "total_s"):
        left = [getattr(draft.limits, one) for draft in drafts]
        assert left == sorted(left, reverse=True)
        assert left[0] > left[-1]
    assert (await edge.post(model="a")).status_code == 200
    assert (edge.jobs.draft.limits.queue_s, edge.jobs.draft.elsewhere) == (5, False)


# keys, money


async def test_a_key_s_models() -> None:
    edge = api()
    cases = {
        ("a", "fast"): {"a": 200, "fast": 200, "b": 403, "auto": 200, "c": 403},
        ("fast",): {"fast": 200, "a": 403, "auto": 200},
        ("b",): {"b": 200, "fast": 403, "auto": 403},
        ("auto",): {"auto": 200, "chat": 200, "a": 403},
    }
    for names, expected in cases.items():
        async with sdk(edge, edge.keys.make(models=frozenset(names))) as client:
            for name, status in expected.items():
                try:
                    answer = await client.chat.completions.with_raw_response.create(
                        model=name, messages=[{"role": "user", "content": "hi"}]
                    )
                    assert (status, answer.parse().model) == (200, "b" if name == "b" else "a"), (names, name)
                except openai.PermissionDeniedError:
                    assert status == 403, (names, name)


async def test_a_stand_in_has_to_be_the_key_s_too() -> None:
    edge = api()
    edge.jobs.alive = {"a", "b"}
    async with sdk(edge, edge.keys.make(models=frozenset({"c", "a"}))) as client:
        answer = await client.chat.completions.create(model="c", messages=[{"role": "user", "content": "hi"}])
        assert answer.model == "a"
    async with sdk(edge, edge.keys.make(models=frozenset({"c"}))) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="c", messages=[{"role": "user", "content": "hi"}])


async def test_who_answers_is_paid() -> None:
    edge = api(price_per_compute_s=1.0, model_prices={"b": 4.0})
    edge.jobs.scripts = [Script(refuse=Unavailable("x")), says("ok")]
    assert (await edge.post(model="c")).json()["usage"]["cost"] == 1.0  # 0.25 s
    assert (await edge.post(model="fast")).json()["usage"]["cost"] == 0.25
    await edge.budgets.close()
    assert [entry.used.model for entry in edge.usage.entries.values()] == ["b", "a"]
    assert 'headrace_requests_total{model="b",outcome="stop",status="200"} 1.0' in edge.metrics.prometheus_text().decode()


# names that no header takes, readiness


async def test_a_folder_may_be_called_anything() -> None:
    response = await Api(["modèle ☃"]).post(model="modèle ☃")
    assert response.headers["x-headrace-model"] == "mod%C3%A8le%20%E2%98%83"
    assert response.json()["model"] == "modèle ☃"


async def test_ready_for_one_or_for_any() -> None:
    edge = api()
    edge.jobs.alive = {"b"}
    async with edge.client() as client:
        paths = ["/ready", "/ready?model=b", "/ready?model=a", "/ready?model=nothing"]
        assert [(await client.get(path)).status_code for path in paths] == [200, 200, 503, 503]
        edge.jobs.alive = set()
        assert (await client.get("/ready")).status_code == 503


async def test_a_stand_in_s_engine_cannot_do_what_was_asked() -> None:
    edge = api()
    edge.jobs.capabilities = Capabilities()
    edge.jobs.alive = {"b", "a"}
    refused = await edge.post(model="c", messages=user("hi")["messages"], seed=7)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    assert not edge.jobs.handles
