"""Responses of several models: who answers is what is stored, in the background too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from schemas.errors import EdgeFull, Unavailable
from services.edge.store.database import Database
from services.settings.selection import SelectionSettings
from tests.edge.fakes import Script, says
from tests.edge.responses.rig import ResponsesApi

SELECTION = SelectionSettings.model_validate(
    {
        "aliases": {"fast": "s"},
        "auto": {"small": "fast", "large": "l", "rules": [{"use": "large", "min_turns": 2}, {"use": "large", "tools": True}]},
        "fallback": {"l": {"to": ["s"]}},
    }
)


@pytest.fixture
async def edge(database: Database) -> AsyncIterator[ResponsesApi]:
    edge = ResponsesApi(database, models=("s", "l"), selection=SELECTION)
    yield edge
    await edge.background.close()


async def test_alias_and_auto(edge: ResponsesApi) -> None:
    async with edge.sdk() as client:
        ask = client.responses.with_raw_response.create
        first = await ask(model="fast", input="hi")
        assert first.headers["x-headrace-model"] == first.parse().model == "s"
        second = await ask(model="auto", input="and?", previous_response_id=first.parse().id)  # the second turn
        assert second.headers["x-headrace-model"] == second.parse().model == "l"
        assert (await client.responses.retrieve(second.parse().id)).model == "l"
        hinted = await ask(model="auto", input="hi", metadata={"headrace_hint": "large"})
        assert (hinted.parse().model, hinted.parse().metadata) == ("l", {"headrace_hint": "large"})
        tools = [{"type": "function", "name": "look", "parameters": {}, "strict": False}]
        assert (await ask(model="auto", input="hi", tools=tools)).parse().model == "l"  # type: ignore[arg-type]


async def test_fallback_is_what_is_stored(edge: ResponsesApi) -> None:
    edge.jobs.scripts = [Script(refuse=Unavailable("x"))]
    async with edge.sdk() as client:
        async with client.responses.with_streaming_response.create(model="l", input="hi", stream=True) as stream:
            assert stream.headers["x-headrace-fallback"] == "l; reason=no_capacity"
            text = "".join([part async for part in stream.iter_text()])
        assert '"model":"s"' in text
        assert '"model":"l"' not in text


async def test_in_the_background(edge: ResponsesApi) -> None:
    edge.detached.scripts = [Script(refuse=Unavailable("x")), says("from s")]
    async with edge.sdk() as client:
        begun = await client.responses.with_raw_response.create(model="l", input="hi", background=True)
        assert begun.headers["x-headrace-model"] == begun.parse().model == "s"
        name = begun.parse().id
        done = begun.parse()
        async with asyncio.timeout(15):
            while done.status != "completed":
                done = await client.responses.retrieve(name)
        assert (done.model, done.output_text) == ("s", "from s")
    assert [job.draft.model for job in edge.detached.jobs.values()] == ["s"]


async def test_what_the_edge_itself_cannot_take_no_other_model_is_tried_for(edge: ResponsesApi) -> None:
    edge.detached.scripts = [Script(refuse=EdgeFull("full", retry_after=1.0))]
    refused = await edge.respond(model="l", background=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["x-headrace-model"] == "l"
    assert not edge.detached.jobs


async def test_a_model_that_this_edge_does_not_serve_is_left_to_others(edge: ResponsesApi, database: Database) -> None:
    edge.detached.default = Script([[40]], finish=None)
    async with edge.sdk() as client:
        begun = await client.responses.create(model="l", input="hi", background=True)
    other = ResponsesApi(database, edge.detached, models=("s",))
    async with other.sdk() as client:
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        with pytest.raises(openai.InternalServerError):
            await client.responses.retrieve(begun.id, stream=True)
    await other.background.close()
