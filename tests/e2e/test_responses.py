"""The Responses API as real processes, by the official SDK: state, streams, background jobs."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

SLOW = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05"}
LONG = {"ignore_eos": True}


def sdk(up: Up) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)


async def ended(client: AsyncOpenAI, name: str) -> str:
    """How the response ended."""
    async with asyncio.timeout(4 * PATIENCE_S):
        while True:
            status = (await client.responses.retrieve(name)).status or ""
            if status not in ("queued", "in_progress"):
                return status
            await asyncio.sleep(0.05)


async def test_streamed_stored_and_built_upon(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    async with sdk(up) as client:
        stream = await client.responses.create(model=up.model, input="one", stream=True, max_output_tokens=30, temperature=0)
        events = [event async for event in stream]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == text
        assert await client.responses.retrieve(last.response.id) == last.response
        asked = {"model": up.model, "temperature": 0, "max_output_tokens": 20}
        built = await client.responses.create(input="two", previous_response_id=last.response.id, **asked)  # type: ignore[call-overload]
        history = [{"role": "user", "content": "one"}, *last.response.output, {"role": "user", "content": "two"}]
        sent = await client.responses.create(input=history, **asked)  # type: ignore[call-overload]
        assert sent.output_text == built.output_text
        assert sent.usage.input_tokens == built.usage.input_tokens


async def test_in_the_background_as_in_the_foreground(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    async with sdk(up) as client:
        asked = {"model": up.model, "input": "tell", "temperature": 0, "max_output_tokens": 60}
        here = await client.responses.create(**asked)  # type: ignore[call-overload]
        made = await client.responses.create(background=True, **asked)  # type: ignore[call-overload]
        assert made.status == "queued"
        assert await ended(client, made.id) == here.status
        done = await client.responses.retrieve(made.id)
        assert done.output_text == here.output_text
        assert done.usage is not None
        assert done.usage.output_tokens == here.usage.output_tokens
        streamed = await client.responses.retrieve(made.id, stream=True)
        assert "".join([e.delta async for e in streamed if e.type == "response.output_text.delta"]) == here.output_text


async def test_a_cancelled_one_stops(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SLOW)
    async with sdk(up) as client, operator(up) as op:
        made = await client.responses.create(
            model=up.model, input="x", background=True, stream=True, max_output_tokens=400, extra_body=LONG
        )
        name = ""
        async for event in made:
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                break
        cancelled = await client.responses.cancel(name)
        assert cancelled.status == "cancelled"
        assert await client.responses.retrieve(name) == cancelled
        await op.assert_clean()
        await client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)
