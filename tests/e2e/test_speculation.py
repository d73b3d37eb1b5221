"""Speculative decoding through the official SDK, over real processes with scripted engines: nobody can tell."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.test_choices import whole
from tests.e2e.test_prompt_logprobs import streamed


async def test_drafts_change_no_answer(scripted_stack: StartScripted) -> None:
    """Of a grammar that leaves few ways to go on, many guesses are right."""
    plain, guessing = scripted_stack(), scripted_stack(HEADRACE_WORKER__SPECULATIVE_TOKENS="7")
    for seed in range(4):
        fields: dict[str, Any] = {"seed": seed, "max_tokens": 60, "n": 1 + seed % 2}
        fields["response_format"] = {"type": "regex", "pattern": "(ab|cd){5,40}"}
        expected, got = await whole(plain, **fields), await whole(guessing, **fields)
        assert got.choices == expected.choices
        assert got.usage.completion_tokens == expected.usage.completion_tokens
        assert (await streamed(guessing, **fields | {"n": 1}))[1] == (await whole(plain, **fields | {"n": 1})).choices[
            0
        ].message.content
    async with operator(guessing) as op:
        await op.assert_clean()
        told = (await op.metrics("decode")).splitlines()
    accepted = [float(line.rpartition(" ")[2]) for line in told if line.startswith("headrace_spec_decode_accepted_tokens_total")]
    assert sum(accepted) > 0, "no guess was right"
