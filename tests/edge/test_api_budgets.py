"""Budgets, requests at once, cost and the ledger, at the HTTP surface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.errors import JobFailed, Overloaded, Quarantined
from services.edge.gate.limits import Limits
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.test_api_keys import CHAT, ask
from tests.text.tiny import byte_ids
from tests.waiting import until

PATH = "/v1/chat/completions"


@asynccontextmanager
async def running(**settings: float) -> AsyncIterator[Api]:
    api = Api(**settings)
    task = asyncio.create_task(api.budgets.run())
    try:
        yield api
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def spoken(api: Api, key: str, **fields: Any) -> int:
    """The tokens that one answer used."""
    answer = await ask(api, PATH, key, body=CHAT | fields)
    assert answer.status_code == 200
    return int(answer.json()["usage"]["total_tokens"])


async def test_a_spent_budget() -> None:
    async with running() as api:
        size = await spoken(api, api.keys.make(), max_tokens=5)
        key = api.keys.make(tenant_limits=Limits(tokens_per_day=2 * size))
        assert [await spoken(api, key, max_tokens=5) for _ in range(2)] == [size, size]
        refused = await ask(api, PATH, key, body=CHAT | {"max_tokens": 5})
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("insufficient_quota", "insufficient_quota", None)
        assert refused.headers["x-should-retry"] == "false"
        assert 1 <= int(refused.headers["retry-after"]) <= 86_400


async def test_what_can_never_fit() -> None:
    async with running() as api:
        key = api.keys.make(limits=Limits(tokens_per_month=10))
        refused = await ask(api, PATH, key, body=CHAT | {"max_tokens": 100})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_requests_at_once() -> None:
    async with running() as api:
        key = api.keys.make(limits=Limits(concurrent=1))
        go = asyncio.Event()
        api.jobs.scripts = [Script([byte_ids("hello")], go=go)]
        first = asyncio.create_task(ask(api, PATH, key, body=CHAT))
        await until(lambda: api.jobs.handles)
        refused = await ask(api, PATH, key, body=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "x-should-retry" not in refused.headers
        go.set()
        assert (await first).status_code == 200
        assert (await ask(api, PATH, key, body=CHAT)).status_code == 200


@pytest.mark.parametrize("how", [Script(refuse=Overloaded("full", retry_after=2.0)), Script([[5]], error=JobFailed("broken"))])
async def test_a_place_is_given_back_however_it_ends(how: Script) -> None:
    async with running() as api:
        key = api.keys.make(limits=Limits(concurrent=1))
        api.jobs.scripts = [how]
        assert (await ask(api, PATH, key, body=CHAT)).status_code in (500, 503)
        assert (await ask(api, PATH, key, body=CHAT)).status_code == 200


async def test_a_request_that_never_began_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as api:
        key = api.keys.make(limits=Limits(concurrent=1))

        def refuse(_: object) -> None:
            raise Quarantined("not again")

        with monkeypatch.context() as patch:
            patch.setattr(api.jobs, "start", refuse)
            for path, body in ((PATH, CHAT), ("/v1/completions", {"model": MODEL, "prompt": "hi"})):
                assert (await ask(api, path, key, body=body)).status_code == 500
        assert (await ask(api, PATH, key, body=CHAT)).status_code == 200


async def test_the_database_is_away() -> None:
    async with running() as api:
        api.usage.down = True
        limited = api.keys.make(limits=Limits(tokens_per_day=10_000))
        refused = await ask(api, PATH, limited, body=CHAT | {"max_tokens": 5})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await ask(api, PATH, api.keys.make(), body=CHAT)).status_code == 200
        api.usage.down = False
        await until(lambda: api.usage.entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_cost_is_in_the_usage_and_in_the_ledger(stream: bool) -> None:
    async with running(price_per_compute_s=0.5) as api:
        key = api.keys.make()
        api.jobs.default = says("hello")
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await ask(api, PATH, key, body=CHAT | options)
        assert '"cost":0.125' in answer.text.replace(" ", "")  # the fake job took 0.25 s
        await until(lambda: api.usage.entries)
        (entry,) = api.usage.entries.values()
        assert (entry.tenant, entry.key != "", entry.used.model) == ("acme", True, MODEL)
        assert (entry.used.job, entry.used.compute_s, entry.used.cost) == (api.jobs.handles[0].id, 0.25, 0.125)
        text = api.metrics.prometheus_text().decode()
        assert 'headrace_cost_total{model="tiny",tenant="acme"} 0.125' in text
        assert 'headrace_compute_seconds_total{model="tiny",tenant="acme"} 0.25' in text


async def test_without_a_price_there_is_no_cost() -> None:
    async with running() as api:
        assert "cost" not in (await ask(api, PATH, api.keys.make(), body=CHAT)).json()["usage"]


async def test_several_prompts_cost_together() -> None:
    async with running(price_per_compute_s=0.5) as api:
        answer = await ask(api, "/v1/completions", api.keys.make(), body={"model": MODEL, "prompt": ["a", "b"]})
        assert answer.json()["usage"]["cost"] == 0.25
