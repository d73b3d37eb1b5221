"""A prompt's log-probabilities through the official SDK, over real processes with scripted engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.e2e.test_choices import ASKED, client, whole

LONG = [{"role": "user", "content": "tell me more " * 12}]
"""More tokens than a step scores."""


async def streamed(up: Up, **fields: Any) -> tuple[Any, str]:
    """What came with the first event, and the text."""
    text, table = "", None
    async with client(up) as sdk:
        async for chunk in await sdk.chat.completions.create(**ASKED | fields, stream=True):
            table = (chunk.model_extra or {}).get("prompt_logprobs", table)
            text += chunk.choices[0].delta.content or ""
    return table, text


@pytest.mark.parametrize("arguments", [(), ("--both", "1")])
async def test_of_a_chat_whole_and_streamed(scripted_stack: StartScripted, arguments: tuple[str, ...]) -> None:
    up = scripted_stack(*arguments)
    asked: dict[str, Any] = {"messages": LONG, "extra_body": {"prompt_logprobs": 3}}
    plain = await whole(up, messages=LONG)
    answer = await whole(up, **asked)
    table = answer.model_extra["prompt_logprobs"]
    assert len(table) == answer.usage.prompt_tokens > 64
    assert table[0] is None
    assert all(1 <= len(row) <= 4 for row in table[1:])
    assert answer.choices == plain.choices
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "the first answer's blocks were there"
    assert await streamed(up, **asked) == (table, plain.choices[0].message.content)
    again = await whole(up, messages=LONG)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    async with operator(up) as op:
        await op.assert_clean()


async def test_of_an_echo(scripted_stack: StartScripted) -> None:
    async with client(scripted_stack()) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt="one two three", max_tokens=3, echo=True, logprobs=2, seed=1)
    (choice,) = answer.choices
    assert choice.text.startswith("one two three")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) >= answer.usage.prompt_tokens + 2
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
