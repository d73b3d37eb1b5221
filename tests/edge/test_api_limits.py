"""Limits at the HTTP surface: statuses, headers, and what is given back."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from schemas.errors import JobFailed, Overloaded
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.gate.limits import Limits
from services.edge.jobs.draft import Delta
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.test_api_keys import CHAT, ask
from tests.waiting import PATIENCE_S

PATH = "/v1/chat/completions"


async def test_over_the_limit() -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=2))
    assert [(await ask(api, PATH, key, body=CHAT)).status_code for _ in range(2)] == [200, 200]
    refused = await ask(api, PATH, key, body=CHAT)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [65]})])
async def test_what_computes_without_a_worker_is_a_request_too(path: str, body: dict[str, Any]) -> None:
    """Whether or not it can be read: it is counted before."""
    api = Api()
    key, other = api.keys.make(limits=Limits(requests_per_minute=3)), api.keys.make()
    answers = [await ask(api, path, key, body=sent) for sent in (body, {"model": 5}, body, body)]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 429]
    refused = answers[-1]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["3"] * 4
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await ask(api, PATH, key, body=CHAT)).status_code == 429
    assert (await ask(api, path, other, body=body)).status_code == 200
    assert (await ask(api, "/v1/models", key)).status_code == 200


async def test_what_was_refused_by_one_limit_is_counted_by_none() -> None:
    api = Api()
    tenant = Limits(requests_per_minute=2)
    keys = [api.keys.make(limits=Limits(requests_per_minute=1), tenant_limits=tenant) for _ in range(2)]
    asked = [(await ask(api, "/tokenize", key, body={"prompt": "hi"})).status_code for key in (keys[0], keys[0], keys[1])]
    assert asked == [200, 429, 200]


async def test_headers_on_every_answer_streams_included() -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=100), tenant_limits=Limits(tokens_per_minute=5000))
    for answer in (
        await ask(api, PATH, key, body=CHAT | {"max_tokens": 10}),
        await ask(api, PATH, key, body=CHAT | {"stream": True, "max_tokens": 10}),
        await ask(api, PATH, key, body=CHAT | {"temperature": 9}),
        await ask(api, "/v1/models", key),
        await ask(api, "/v1/nothing", key),
    ):
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        assert answer.headers["x-ratelimit-limit-tokens"] == "5000"
        assert re.fullmatch(r"\d+ms|\d+(\.\d)?s", answer.headers["x-ratelimit-reset-tokens"])


async def test_what_is_left_is_what_was_not_asked_for() -> None:
    """Clients pace themselves by it."""
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=100, tokens_per_minute=200_000))
    told = []
    for path, body in (("/v1/models", None), ("/tokenize", {"prompt": "hi"}), (PATH, CHAT | {"max_tokens": 10})):
        answer = await ask(api, path, key, body=body)
        told.append([int(answer.headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "tokens")])
    assert told[:2] == [[100, 200_000], [99, 200_000]]
    assert told[2][0] == 98
    assert 199_000 < told[2][1] < 200_000


async def test_tokens_settle_to_what_was_used() -> None:
    api = Api()
    api.jobs.default = says("hello")
    key = api.keys.make(limits=Limits(tokens_per_minute=500))
    asked = CHAT | {"max_tokens": 400}
    assert [(await ask(api, PATH, key, body=asked)).status_code for _ in range(3)] == [200] * 3
    assert (await ask(api, PATH, key, body=asked | {"stream": True})).status_code == 200


GENERATE = {
    PATH: CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
}


@pytest.mark.parametrize("path", GENERATE)
async def test_a_job_that_nobody_took_costs_nothing(path: str) -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=1))
    api.jobs.scripts = [Script(refuse=Overloaded("full", retry_after=2.0))]
    refused = await ask(api, path, key, body=GENERATE[path])
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (503, "1")
    assert [(await ask(api, path, key, body=GENERATE[path])).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_began_is_a_request_however_it_ends(path: str, stream: bool) -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=1))
    api.jobs.scripts = [Script([[65]], error=JobFailed("broken"))]
    statuses = [(await ask(api, path, key, body=GENERATE[path] | {"stream": stream})).status_code for _ in range(2)]
    assert statuses == ([200, 429] if stream else [500, 200])


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("wrong", [{"temperature": 9}, {"model": "none"}, {"max_tokens": 400}])
async def test_a_refused_request_to_generate_is_one(path: str, wrong: dict[str, Any]) -> None:
    """What is refused by what it says, or by another limit, was read: it cannot be sent without end."""
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=2, output_tokens=100))
    answers = [await ask(api, path, key, body=GENERATE[path] | wrong) for _ in range(3)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[0] in (400, 404)
    assert statuses[1:] == [statuses[0], 429]


async def test_over_the_limit_the_body_is_not_read() -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=1))
    assert [(await ask(api, PATH, key, body=["no object"])).status_code for _ in range(2)] == [400, 429]


async def test_counters_down_is_503() -> None:
    api = Api()
    key = api.keys.make(limits=Limits(requests_per_minute=10))
    api.counters.down = True
    refused = await ask(api, PATH, key, body=CHAT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("path", "body"), [(PATH, CHAT), (PATH, {}), ("/v1/nothing", {})])
async def test_without_limits_the_headers_say_so(path: str, body: dict[str, object]) -> None:
    api = Api()
    answer = await ask(api, path, api.keys.make(), body=body)
    for kind in ("requests", "tokens"):
        told = [answer.headers[f"x-ratelimit-{name}-{kind}"] for name in ("limit", "remaining", "reset")]
        assert told == ["2147483647", "2147483647", "0ms"]


@pytest.mark.parametrize("field", ["output_tokens", "tokens_per_minute", "tokens_per_day", "tokens_per_month"])
@pytest.mark.parametrize("n", [1, 2])
async def test_who_does_not_say_how_long_an_answer_may_be_gets_what_fits(field: str, n: int) -> None:
    """SDKs send no `max_tokens` by themselves: a context that is longer than a limit must not refuse all they ask."""
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    api.jobs.default = Script(deltas=[[Delta(choice, [], FinishReason.STOP) for choice in range(n)]])
    keeping = asyncio.create_task(api.budgets.run())
    for limits in ({"limits": Limits(**{field: 100})}, {"tenant_limits": Limits(**{field: 100})}):
        key = api.keys.make(tenant=f"tenant{len(api.keys.records)}", **limits)
        assert (await ask(api, PATH, key, body=CHAT | {"n": n, "max_tokens": 101})).status_code == 400
        assert (await ask(api, PATH, key, body=CHAT | {"n": n})).status_code == 200
        prompt = 0 if field == "output_tokens" else api.jobs.draft.prompt_tokens
        assert api.jobs.draft.sampling.max_tokens == (100 - prompt) // n
    keeping.cancel()


@pytest.mark.parametrize("field", ["output_tokens", "tokens_per_minute"])
@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (2, 1), (2, 3)])
async def test_a_completion_that_does_not_say_how_long_it_may_be_gets_what_fits(field: str, prompts: int, n: int) -> None:
    """All choices of all prompts together, and no more than the 16 tokens that are usual."""
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    api.jobs.default = Script(deltas=[[Delta(choice, [], FinishReason.STOP) for choice in range(n)]])
    body = {"model": MODEL, "prompt": ["x"] * prompts, "n": n}
    key = api.keys.make(limits=Limits(**{field: 14}))
    assert (await ask(api, "/v1/completions", key, body=body | {"max_tokens": 15})).status_code == 400
    assert (await ask(api, "/v1/completions", key, body=body)).status_code == 200
    room = 14 - (0 if field == "output_tokens" else prompts * api.jobs.draft.prompt_tokens)
    assert api.jobs.draft.sampling.max_tokens == room // (prompts * n)
    assert (await ask(api, "/v1/completions", api.keys.make(), body=body)).status_code == 200
    assert api.jobs.draft.sampling.max_tokens == 16


async def test_a_prompt_over_the_limit_is_told_by_its_own_name() -> None:
    api = Api()
    key = api.keys.make(limits=Limits(prompt_tokens=3))
    for path, body in ((PATH, CHAT), ("/v1/completions", {"model": MODEL, "prompt": "a long one"})):
        refused = await ask(api, path, key, body=body)
        assert (refused.status_code, refused.json()["error"]["param"] in body) == (400, True)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (PATH, {"max_tokens": 2**31}, 400),
        (PATH, {"max_tokens": 100, "n": 4}, 400),
        ("/v1/completions", {"prompt": ["x"] * 20, "max_tokens": 8, "n": 4}, 400),
        ("/v1/completions", {"prompt": ["x"] * 4, "max_tokens": 8, "n": 4}, 429),
        (PATH, {"max_tokens": 100}, 429),
    ],
)
async def test_all_that_a_request_may_generate_is_checked_at_once(path: str, fields: dict[str, Any], status: int) -> None:
    """faults.md, gateway: one cost check of prompts x n x tokens, before any of it is published: 400 where it can never fit, 429
    where it does not now. Nothing of what was refused is kept."""
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True)
    key = api.keys.make(limits=Limits(tokens_per_minute=300))
    begun = CHAT | {"max_tokens": 200}
    api.jobs.default = says("x" * 200)
    assert (await ask(api, PATH, key, body=begun)).status_code == 200
    prompt = {"messages": CHAT["messages"]} if path == PATH else {}
    refused = await ask(api, path, key, body={"model": MODEL, **prompt, **fields})
    assert refused.status_code == status, refused.text
    assert len(api.jobs.handles) == 1
    api.jobs.default = says("y")
    async with asyncio.timeout(PATIENCE_S):
        # a limit that was used up is believed to be so for a second
        while (await ask(api, PATH, key, body=CHAT | {"max_tokens": 5})).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
