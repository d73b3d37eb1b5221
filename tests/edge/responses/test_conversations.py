"""Conversations: their items, what responses add to them, and who sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from services.edge.gate.limits import Limits
from services.edge.store import conversations as store
from tests.edge.fakes import MODEL, says
from tests.edge.responses.rig import ResponsesApi
from tests.edge.responses.test_background import stands
from tests.edge.responses.test_create import prompt

NEVER = "conv_" + "0" * 32


async def test_with_the_sdk(api: ResponsesApi) -> None:
    async with api.sdk() as client:
        made = await client.conversations.create(metadata={"a": "b"}, items=[{"role": "developer", "content": "Be brief."}])
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert (await client.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        assert (await client.conversations.retrieve(made.id)).metadata == {"c": "d"}
        for text in ("one", "two"):
            response = await client.responses.create(model=MODEL, input=text, conversation=made.id)
            assert response.conversation is not None
            assert response.conversation.id == made.id
        items: list[Any] = [item async for item in client.conversations.items.list(made.id, order="asc", limit=2)]
        texts = [(item.role, item.content[0].text) for item in items]
        hello = ("assistant", "hello")
        assert texts == [("developer", "Be brief."), ("user", "one"), hello, ("user", "two"), hello]
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "three"}])
        assert (await client.conversations.items.retrieve(added.data[0].id or "", conversation_id=made.id)) == added.data[0]
        await client.conversations.items.delete(added.data[0].id or "", conversation_id=made.id)
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
    assert prompt(api).endswith("<|user|>one<|end|>\n<|assistant|>hello<|end|>\n<|user|>two<|end|>\n<|assistant|>")


async def test_a_background_response_adds_once(api: ResponsesApi) -> None:
    name = (await api.ask("POST", "/v1/conversations", metadata={})).json()["id"]
    api.detached.default = says("hello")
    made = (await api.respond(background=True, conversation={"id": name})).json()
    await stands(api, made["id"], "completed")
    await api.ask("GET", f"/v1/responses/{made['id']}?stream=true")
    assert len((await api.ask("GET", f"/v1/conversations/{name}/items")).json()["data"]) == 2


async def test_a_response_that_is_not_stored_adds_too(api: ResponsesApi) -> None:
    name = (await api.ask("POST", "/v1/conversations", metadata={})).json()["id"]
    await api.respond(conversation=name, store=False)
    assert len((await api.ask("GET", f"/v1/conversations/{name}/items")).json()["data"]) == 2


async def test_one_that_is_full_takes_no_more(api: ResponsesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is sent to it, what one request has to read is bounded."""
    monkeypatch.setattr(store, "MOST_BYTES", 1000)
    name = (await api.ask("POST", "/v1/conversations", metadata={})).json()["id"]
    items = f"/v1/conversations/{name}/items"
    answers = [await api.ask("POST", items, items=[{"role": "user", "content": "x" * 600}]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 413]
    assert answers[-1].json()["error"]["param"] == "items"
    assert (await api.respond(conversation=name)).status_code == 200
    kept = (await api.ask("GET", items)).json()["data"]
    assert len(kept) == 2
    assert (await api.ask("DELETE", f"{items}/{kept[0]['id']}")).status_code == 200
    assert (await api.ask("POST", items, items=[{"role": "user", "content": "x"}])).status_code == 200


async def test_an_id_names_one_item_of_all_that_was_said(api: ResponsesApi) -> None:
    """Pages of items go on behind an id: with two of one name they would never end."""
    one, other = ({"role": "user", "content": "x", "id": name} for name in ("msg_1", "msg_2"))
    assert (await api.ask("POST", "/v1/conversations", items=[one, one])).json()["error"]["param"] == "items[1].id"
    assert (await api.ask("POST", "/v1/conversations", items="x")).json()["error"]["param"] == "items"
    name = (await api.ask("POST", "/v1/conversations", items=[one])).json()["id"]
    items = f"/v1/conversations/{name}/items"
    assert (await api.ask("POST", items, items=[other, one])).json()["error"]["param"] == "items[1].id"
    assert (await api.ask("POST", items, items=[other])).status_code == 200
    first = (await api.respond(input=[one, other])).json()
    for fields in ({"conversation": name}, {"previous_response_id": first["id"]}, {"input": [other, other]}):
        refused = await api.respond(**{"input": [{"role": "user", "content": "new"}, other], **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].id")
    again = await api.respond(input=first["output"], previous_response_id=first["id"])
    assert (again.status_code, again.json()["error"]["param"]) == (400, "input[0].id")


async def test_of_additions_at_the_same_time_one_has_the_id(api: ResponsesApi) -> None:
    name = (await api.ask("POST", "/v1/conversations", metadata={})).json()["id"]
    items = f"/v1/conversations/{name}/items"
    same = {"items": [{"role": "user", "content": "x", "id": "msg_1"}]}
    answers = await asyncio.gather(*(api.ask("POST", items, **same) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
    refused = await api.ask("POST", items, **same)
    assert {answer.text for answer in answers if answer.status_code == 400} == {refused.text}
    assert refused.json()["error"]["param"] == "items[0].id"
    assert len((await api.ask("GET", items)).json()["data"]) == 1


async def test_what_writes_is_a_request_of_the_minute(api: ResponsesApi) -> None:
    """What only reads is none, also for somebody who may not write any more."""
    key = api.keys.make(tenant="acme", limits=Limits(requests_per_minute=5))
    name = (await api.ask("POST", "/v1/conversations", key, metadata={})).json()["id"]
    one, items = f"/v1/conversations/{name}", f"/v1/conversations/{name}/items"
    assert (await api.ask("POST", one, key, metadata={"a": "b"})).status_code == 200
    item = (await api.ask("POST", items, key, items=[{"role": "user", "content": "hi"}])).json()["data"][0]["id"]
    assert (await api.ask("DELETE", f"{items}/{item}", key)).status_code == 200
    assert (await api.ask("POST", "/v1/conversations", key, metadata=5)).status_code == 400
    for method, path in (("POST", "/v1/conversations"), ("POST", one), ("POST", items), ("DELETE", one)):
        refused = await api.ask(method, path, key, metadata={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded"), (method, path)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    for path in (one, items):
        assert (await api.ask("GET", path, key)).status_code == 200


async def test_a_history_has_one_source(api: ResponsesApi) -> None:
    """Whether or not either is there."""
    refused = (await api.respond(conversation="conv_x", previous_response_id="resp_x")).json()["error"]
    assert refused["message"].startswith("Only one of")
    assert refused["param"] == "previous_response_id"


async def test_tenants_do_not_see_each_other(api: ResponsesApi) -> None:
    """faults.md, privacy: another tenant's conversation: 404, as an id that never was, word for word."""
    ours, theirs = api.keys.make(tenant="acme"), api.keys.make(tenant="globex")
    made = await api.ask("POST", "/v1/conversations", ours, items=[{"role": "user", "content": "x", "id": "msg_1"}])
    name = made.json()["id"]
    item = {"items": [{"role": "user", "content": "x"}]}
    for method, path, body in (
        ("GET", "", {}),
        ("POST", "", {"metadata": {"a": "b"}}),
        ("GET", "/items", {}),
        ("POST", "/items", item),
        ("GET", "/items/msg_1", {}),
        ("DELETE", "/items/msg_1", {}),
        ("DELETE", "", {}),
    ):
        answer = await api.ask(method, f"/v1/conversations/{name}{path}", theirs, **body)
        assert answer.status_code == 404, (method, path)
        nobodys = await api.ask(method, f"/v1/conversations/{NEVER}{path}", theirs, **body)
        assert answer.text.replace(name, NEVER) == nobodys.text
    across, unknown = [await api.respond(theirs, conversation=one) for one in (name, NEVER)]
    assert (across.status_code, across.text.replace(name, NEVER)) == (404, unknown.text)
    assert len((await api.ask("GET", f"/v1/conversations/{name}/items", ours)).json()["data"]) == 1
