"""n > 1 of TensorRT-LLM, whose handoff has one choice: through the official SDK over edge, router and workers with its double."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from schemas.state import Role
from tests.edge.fakes import MODEL
from tests.edge.stack import Stack, stack
from tests.edge.test_http import MESSAGES, sdk, served
from tests.engine.trtllm_engine.double import EOS, RequestError, World
from tests.engine.trtllm_engine.rig import build
from tests.text.tiny import byte_ids
from tests.waiting import until

TEXT = "water turns wheels"
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30}


@asynccontextmanager
async def pair(world: World) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI]]:
    """Prefill and decode; the prefill engine is world.engines[0]."""
    world.answer = spoken
    engines = {role: build(world, role, timeout_s=2.0) for role in (Role.PREFILL, Role.DECODE)}
    for engine in engines.values():
        await engine.warm_up()
        engine.info = replace(engine.info, model=MODEL)
    async with stack(dict(engines)) as s, served(s.api) as server, sdk(server) as client:
        yield s, client
        await until(lambda: s.clean() and all(engine.used == 0 for engine in world.engines))


def spoken(prompt: Sequence[int], generated: Sequence[int]) -> int:
    return [*byte_ids(TEXT), EOS][len(generated)]


async def test_three_choices_are_three_handoffs_and_one_answer() -> None:
    world = World()
    async with pair(world) as (_, client):
        whole = await client.chat.completions.create(**ASKED, n=3, temperature=1)
        assert [(choice.index, choice.message.content, choice.finish_reason) for choice in whole.choices] == [
            (index, TEXT, "stop") for index in range(3)
        ]
        assert len(set(world.consumed)) == len(world.consumed) == 3
        alone = await client.chat.completions.create(**ASKED)
        assert whole.usage is not None
        assert alone.usage is not None
        assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
        assert whole.usage.completion_tokens == 3 * alone.usage.completion_tokens


async def test_streamed_with_a_stop_string() -> None:
    async with pair(World()) as (_, client):
        options: dict[str, Any] = {"n": 2, "stop": [" wheels"], "stream_options": {"include_usage": True}}
        texts: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(**ASKED, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        assert texts == {0: "water turns", 1: "water turns"}
        assert chunk.usage is not None


@pytest.mark.parametrize("tokens", [1, 2, 7])
async def test_a_short_answer_of_two_prompts(tokens: int) -> None:
    async with pair(World()) as (_, client):
        answer = await client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=tokens)
        assert [choice.text for choice in answer.choices] == [TEXT[:tokens]] * 4
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


async def test_a_client_that_leaves_during_the_transfers_leaves_nothing() -> None:
    world = World()
    async with pair(world) as (s, client):
        world.transfer_s = 0.3
        stream = await client.chat.completions.create(**ASKED, n=4, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: not len(s.edge))
        await until(lambda: len(world.consumed) == 4)


async def test_one_that_fails_ends_the_answer_in_band_and_the_others_with_it() -> None:
    world = World()
    async with pair(world) as (s, client):
        world.step_s, decode = 0.05, world.engines[1]
        stream = await client.chat.completions.create(**ASKED, n=3, stream=True)
        await until(lambda: len(decode.active) == 3 and all(request.started for request in decode.active))
        decode.active.pop().result.say(RequestError("out of luck"))
        with pytest.raises(openai.APIError):
            await _read_to_the_end(stream)
        await until(lambda: not len(s.edge))


async def _read_to_the_end(stream: openai.AsyncStream[Any]) -> None:
    async for _ in stream:
        continue
