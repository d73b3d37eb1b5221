"""Who answers in another model's place, when, and what the caller is told of it."""

from __future__ import annotations

from functools import partial

import openai
import pytest

from schemas.errors import HeadraceError, JobFailed, ModelLoading, Overloaded, RateLimited, Unavailable
from schemas.state import Capabilities
from services.edge.gate.limits import Limits
from services.settings.selection import SelectionSettings
from tests.edge.fakes import Api, Script, says
from tests.edge.selection.rig import CODE, MODELS, api, chosen, sdk, user
from tests.edge.sse import read_stream


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
    key = edge.keys.make(limits=Limits(requests_per_minute=2, tokens_per_minute=60))
    async with sdk(edge, key) as client:
        ask = partial(client.chat.completions.with_raw_response.create, model="c", messages=[{"role": "user", "content": "hi"}])
        edge.jobs.scripts = [Script(refuse=Unavailable("x")), says("ok")]
        first = await ask(max_tokens=5)  # both tries count once
        assert (first.headers["x-headrace-model"], first.headers["x-ratelimit-remaining-requests"]) == ("b", "1")
        with pytest.raises(openai.RateLimitError) as tokens:
            await ask(max_tokens=50)
        with pytest.raises(openai.RateLimitError) as requests:
            await ask(max_tokens=5)
    assert tokens.value.response.headers["x-headrace-model"] == "c"
    assert "x-headrace-fallback" not in tokens.value.response.headers
    assert "x-headrace-model" not in requests.value.response.headers, "it was not read"


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


async def test_a_stand_in_s_engine_cannot_do_what_was_asked() -> None:
    edge = api()
    edge.jobs.capabilities = Capabilities()
    edge.jobs.alive = {"b", "a"}
    refused = await edge.post(model="c", messages=user("hi")["messages"], seed=7)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    assert not edge.jobs.handles
