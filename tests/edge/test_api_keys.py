"""Keys at the HTTP surface."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from schemas.job import Tier
from services.edge.tenant import tenant
from tests.edge.fakes import MODEL, SECRET, Api, Script
from tests.edge.sse import read_stream
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def ask(api: Api, path: str, key: str | None = None, peer: str = "203.0.113.7", body: object = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(api.app, client=(peer, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://edge", headers=headers) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/nothing"])
@pytest.mark.parametrize("key", [None, "wrong", "hr-" + "a" * 16 + "-" + "a" * 52])
async def test_without_a_valid_key_nothing_is_reached(path: str, key: str | None) -> None:
    api = Api()
    response = await ask(api, path, key, body=CHAT)
    assert response.status_code == 401
    assert response.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert response.headers["x-request-id"]
    assert not api.jobs.handles


async def test_a_key_brings_its_tenant_and_tier() -> None:
    api = Api()
    key = api.keys.make(tenant="acme", tier=Tier.FREE)
    assert (await ask(api, "/v1/chat/completions", key, body=CHAT)).status_code == 200
    assert (api.jobs.draft.salt, api.jobs.draft.tier) == (tenant(SECRET, "acme").salt, Tier.FREE)


@pytest.mark.parametrize("field", ["priority", "service_tier", "tier", "user", "metadata", "lane", "tenant", "salt"])
@pytest.mark.parametrize("claim", [100, -100, "priority", "enterprise", {"tier": "enterprise"}])
async def test_what_a_caller_says_of_its_own_rank_counts_for_nothing(field: str, claim: object) -> None:
    """faults.md, gateway: priority forged by a free key, in the body: refused as no value of the field, or without effect."""
    api = Api()
    key, ours = api.keys.make(tenant="acme", tier=Tier.FREE), tenant(SECRET, "acme")
    answer = await ask(api, "/v1/chat/completions", key, body=CHAT | {field: claim})
    assert answer.status_code in (200, 400)
    assert all((job.draft.tier, job.draft.lane, job.draft.salt) == (Tier.FREE, ours.lane, ours.salt) for job in api.jobs.handles)
    assert answer.status_code == 400 or answer.json()["service_tier"] == "flex"


async def test_no_header_makes_a_caller_another_one() -> None:
    """faults.md, gateway: priority header forged by a free key -> its own tier."""
    api = Api()
    key, ours = api.keys.make(tenant="acme", tier=Tier.FREE), tenant(SECRET, "acme")
    names = (
        "priority",
        "x-priority",
        "tier",
        "x-tier",
        "x-headrace-tier",
        "x-headrace-priority",
        "x-tenant",
        "x-headrace-tenant",
    )
    names += ("openai-organization", "openai-project", "x-request-priority", "nats-request-info", "lane", "service-tier")
    forged = dict.fromkeys(names, "enterprise") | {"authorization": f"Bearer {key}", "priority": "u=0, i"}
    async with api.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=forged)
    assert (answer.status_code, answer.json()["service_tier"]) == (200, "flex")
    draft = api.jobs.draft
    assert (draft.tier, draft.lane, draft.salt) == (Tier.FREE, ours.lane, ours.salt)


async def test_a_key_that_is_revoked_while_its_stream_runs() -> None:
    """faults.md, gateway: key revoked mid-stream. The stream goes on; the next request is refused once the edge has heard."""
    api = Api()
    key, go = api.keys.make(), asyncio.Event()
    api.jobs.default = Script([byte_ids("hello")], go=go)
    streamed = asyncio.create_task(ask(api, "/v1/chat/completions", key, body=CHAT | {"stream": True}))
    await until(lambda: api.jobs.handles and api.jobs.handles[0].waiting.is_set())
    api.keys.change(key, revoked=1.0, changed=1.0)
    keeping_up = asyncio.create_task(api.keyring.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (await ask(api, "/v1/models", key)).status_code != 401:  # noqa: ASYNC110 - told in answers only
                await asyncio.sleep(0.01)
    finally:
        keeping_up.cancel()
    go.set()
    assert read_stream((await streamed).content).content == "hello"


async def test_models_that_are_not_the_keys() -> None:
    api = Api()
    key = api.keys.make(models=frozenset({"other"}))
    refused = await ask(api, "/v1/chat/completions", key, body=CHAT)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
    assert (await ask(api, "/v1/models", key)).json()["data"] == []
    assert (await ask(api, f"/v1/models/{MODEL}", key)).status_code == 403
    assert (await ask(api, "/v1/models", api.keys.make())).json()["data"][0]["id"] == MODEL


async def test_without_the_database_an_unknown_key_waits() -> None:
    api = Api()
    key = api.keys.make()
    api.keys.down = True
    response = await ask(api, "/v1/models", key)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_two_authorization_headers_are_refused() -> None:
    """Whichever comes first: who stands before us may have read the other one."""
    api = Api()
    key = api.keys.make()
    for values in (["unused", key], [key, "unused"], [key, key]):
        headers = [("authorization", f"Bearer {value}") for value in values]
        async with api.client() as client:
            response = await client.get("/v1/models", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
