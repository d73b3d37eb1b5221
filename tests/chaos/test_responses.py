"""Background responses while edges die: a stream goes on where it was, at another edge, and says what an undisturbed one says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.chaos.processes import back, kill
from tests.chaos.streams import ready, until
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_EDGES = ("--prefill", "2", "--decode", "2", "--edge", "2")
STEP = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05"}
LONG = {"ignore_eos": True}
BROKE_OFF = (httpx.HTTPError, openai.APIConnectionError)


@dataclass
class Heard:
    """All events of one response, over any number of streams."""

    name: str = ""
    numbers: list[int] = field(default_factory=list)
    text: str = ""
    final: str = ""

    def take(self, event: openai.types.responses.ResponseStreamEvent) -> None:
        self.numbers.append(event.sequence_number)
        if event.type == "response.created":
            self.name = event.response.id
        if event.type == "response.output_text.delta":
            self.text += event.delta
        if event.type in ("response.completed", "response.incomplete", "response.failed"):
            self.final = event.response.output_text  # type: ignore[union-attr]


async def begin(client: AsyncOpenAI, model: str, number: int, heard: Heard) -> None:
    stream = await client.responses.create(
        model=model,
        input=f"question {number}",
        background=True,
        stream=True,
        temperature=0,
        max_output_tokens=150,
        extra_body=LONG,
    )
    try:
        async for event in stream:
            heard.take(event)
    except BROKE_OFF:
        pass  # the edge was killed


async def go_on(client: AsyncOpenAI, heard: Heard) -> None:
    async for event in await client.responses.retrieve(heard.name, stream=True, starting_after=heard.numbers[-1]):
        heard.take(event)


@pytest.mark.parametrize("resumed_at", ["the other", "the new one"])
async def test_the_edge_is_killed_in_the_middle(scripted_stack: StartScripted, resumed_at: str) -> None:
    up = scripted_stack(*TWO_EDGES, **STEP)
    urls = [f"http://127.0.0.1:{up.port + at}" for at in range(2)]
    clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) for url in urls]
    async with operator(up) as op, clients[0] as first, clients[1] as second:
        expected = [Heard() for _ in range(6)]
        await asyncio.gather(*(begin(second, up.model, number, heard) for number, heard in enumerate(expected)))
        found = [Heard() for _ in range(6)]
        reading = [asyncio.create_task(begin(first, up.model, number, heard)) for number, heard in enumerate(found)]
        await until(lambda: all(len(heard.text) > 20 for heard in found), 30.0)
        before = kill(up, "e1")
        await asyncio.gather(*reading)
        assert not any(heard.final for heard in found)
        if resumed_at == "the new one":
            await back(up, "e1", before)
            await ready(urls[0])
        client = second if resumed_at == "the other" else first
        await asyncio.gather(*(go_on(client, heard) for heard in found))
        for heard, undisturbed in zip(found, expected, strict=True):
            assert heard.numbers == undisturbed.numbers == list(range(len(heard.numbers)))
            assert heard.text == undisturbed.text == heard.final
            kept = await second.responses.retrieve(heard.name)
            assert kept.output_text == heard.text
        await back(up, "e1", before)
        await ready(urls[0])
        await op.assert_clean()


async def test_nobody_reads_what_a_dead_edge_began(scripted_stack: StartScripted) -> None:
    """It is brought to its end, and kept, by another edge."""
    up = scripted_stack(*TWO_EDGES, **STEP)
    urls = [f"http://127.0.0.1:{up.port + at}" for at in range(2)]
    clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) for url in urls]
    async with clients[0] as first, clients[1] as second:
        made = await first.responses.create(
            model=up.model, input="x", background=True, max_output_tokens=60, temperature=0, extra_body=LONG
        )
        before = kill(up, "e1")
        async with asyncio.timeout(60):
            while (found := await second.responses.retrieve(made.id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert found.status == "incomplete", found.error
        assert found.usage is not None
        assert found.usage.output_tokens == 60
        await back(up, "e1", before)
        await ready(urls[0])
