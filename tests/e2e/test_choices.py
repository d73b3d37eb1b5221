"""n, stop strings and log-probabilities through the official SDK, over real processes with scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up

SLOW_DECODE = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.02"}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me three things"}],
    "seed": 5,
    "max_tokens": 24,
    "temperature": 1.0,
}


def client(up: Up) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0, timeout=60)


async def whole(up: Up, **fields: Any) -> Any:
    async with client(up) as sdk:
        return await sdk.chat.completions.create(**ASKED | fields)


async def test_three_choices_streamed_and_whole(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    answer = await whole(up, n=3, logprobs=True, top_logprobs=2)
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert len(set(texts.values())) == 3
    streamed: dict[int, str] = {}
    joined: dict[int, bytes] = {}
    usage = None
    async with client(up) as sdk:
        options = {"include_usage": True}
        stream = await sdk.chat.completions.create(
            **ASKED, n=3, logprobs=True, top_logprobs=2, stream=True, stream_options=options
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
                for token in (choice.logprobs.content or []) if choice.logprobs else []:
                    assert len(token.top_logprobs) == 2
                    joined[choice.index] = joined.get(choice.index, b"") + bytes(token.bytes or ())
    assert streamed == texts
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens
    for choice in answer.choices:
        assert b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content) == joined[choice.index]


@pytest.mark.parametrize("arguments", [("--prefill", "2", "--decode", "2"), ("--both", "1")])
async def test_other_shapes_give_the_same_choices(scripted_stack: StartScripted, arguments: tuple[str, ...]) -> None:
    expected = await whole(scripted_stack(), n=4)
    got = await asyncio.gather(*(whole(scripted_stack(*arguments), n=4) for _ in range(4)))
    for answer in got:
        assert answer.choices == expected.choices
        assert answer.usage.completion_tokens == expected.usage.completion_tokens


async def test_a_stop_string_ends_its_choice_and_no_block_is_left(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SLOW_DECODE)
    free = await whole(up, n=3)
    (stop, *_) = [
        character for character in free.choices[0].message.content[:12] if character.isascii() and character.isprintable()
    ]
    stopped = await whole(up, n=3, stop=[stop])
    for before, after in zip(free.choices, stopped.choices, strict=True):
        assert after.message.content == before.message.content.split(stop)[0]
    assert stopped.usage.completion_tokens < free.usage.completion_tokens
    async with operator(up) as op:
        await op.assert_clean()


async def test_an_engine_of_one_choice_a_run_gets_a_job_for_each(scripted_stack: StartScripted) -> None:
    up = scripted_stack(HEADRACE_SCRIPTED__N="false")
    answer = await whole(up, n=3, logprobs=True)
    alone = await whole(up, logprobs=True)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.choices[0] == alone.choices[0]
    again = await whole(up, n=3, logprobs=True)
    assert again.choices == answer.choices
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices) + _ends(answer)
    async with operator(up) as op:
        await op.assert_clean()


async def test_such_a_client_that_leaves_leaves_nothing(scripted_stack: StartScripted) -> None:
    up = scripted_stack(HEADRACE_SCRIPTED__N="false", **SLOW_DECODE)
    async with client(up) as sdk:
        stream = await sdk.chat.completions.create(**ASKED | {"max_tokens": 400}, n=4, stream=True)
        begun: set[int] = set()
        async for chunk in stream:
            begun |= {choice.index for choice in chunk.choices}
            if len(begun) == 4:
                break
        await stream.close()
    async with operator(up) as op:
        await op.assert_clean()


def _ends(answer: Any) -> int:
    """End tokens, which count and have no log-probabilities of their own."""
    return sum(choice.finish_reason == "stop" for choice in answer.choices)
