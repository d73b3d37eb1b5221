"""The next turn of a conversation: its beginning lies on prefill, the last answer on decode, and neither is computed again."""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator

SLOW_PREFILL = {"HEADRACE_SCRIPTED__PREFILL_TOKEN_S": "0.004"}
DIGITS = {"type": "regex", "pattern": "[0-9]{200}"}
QUESTION = " and then? " * 15
"""More than a step: decode does not compute it itself."""
BLOCK = 16


async def test_prefill_fetches_the_last_answer_from_decode(scripted_stack: StartScripted) -> None:
    """Routers hear of caches and rates in beats, so the very first conversation may be too early."""
    up = scripted_stack(**SLOW_PREFILL)
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client, operator(up) as person:
        for number in range(5):
            first = f"{number}: once upon a time, and what came of it, is told here:"
            turn = await complete(client, up.model, first, max_tokens=200, response_format=DIGITS)
            conversation = first + turn["choices"][0]["text"]
            before = fetched(await person.metrics("prefill"))
            again = await complete(client, up.model, conversation + QUESTION, max_tokens=2)
            if fetched(await person.metrics("prefill")) > before:
                break
        else:
            raise AssertionError("nothing was ever fetched")
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (len(conversation) // BLOCK - 1) * BLOCK
        await person.assert_clean()


async def complete(client: httpx.AsyncClient, model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def fetched(metrics: str) -> float:
    """How often prefill fetched what it wanted."""
    lines = [line for line in metrics.splitlines() if line.startswith("headrace_kv_fetches_total{") and '"fetched"' in line]
    return sum(float(line.split()[-1]) for line in lines)
