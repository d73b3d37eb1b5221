"""Whatever a request asks for, a decode worker that dies in the middle of its answer changes nothing of it.

Several choices of which some are done, log-probabilities, stop strings of which half has been seen, constrained output, usage.
(Penalties need logits: test_torch.py.)
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from schemas.codec import decode
from schemas.job import Job
from tests.chaos.processes import back, kill
from tests.chaos.streams import clients, lines, ready, until
from tests.chaos.tap import tap
from tests.e2e.conftest import StartScripted
from tests.e2e.running import Up
from tests.e2e.test_response_format import LIST, PERSON
from tests.text.tiny import tiny_tokenizer_json
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.06"}
"""So slow that an answer is still where it should be when its worker dies, also if another has stood still meanwhile."""
TOKENS = 120
STOP_LENGTH = 12
LONG_LIST = {"type": "regex", "pattern": "(red|green|blue)(, (red|green|blue)){60,90}"}
"""Lasts for all of `TOKENS`, so that it runs whenever its worker dies."""
SEEN = 20
"""Tokens of the plain stream when its worker dies."""


@dataclass
class Said:
    """One streamed answer, put together by choice."""

    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        if usage := chunk.get("usage"):  # what was cached may differ
            self.usage = {key: count for key, count in usage.items() if key != "prompt_tokens_details"}
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in self.finish, "something came after the end of a choice"
            self.text[index] = self.text.get(index, "") + (choice["delta"].get("content") or "")
            self.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("content") or ())
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]


def request(seed: int, **how: Any) -> dict[str, Any]:
    base = {"model": "tiny", "messages": [{"role": "user", "content": "the same question"}], "max_tokens": TOKENS}
    return base | {"seed": seed, "temperature": 1, "stream": True, "stream_options": {"include_usage": True}} | how


async def answer(client: httpx.AsyncClient, body: dict[str, Any], heard: Callable[[], object] = lambda: None) -> Said:
    said = Said()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in lines(response):
            if line.startswith("data: ") and line != "data: [DONE]":
                said.take(json.loads(line[6:]))
                heard()
    return said


async def test_everything_a_request_can_ask_for(scripted_stack: StartScripted) -> None:
    up = scripted_stack("--prefill", "2", "--decode", "2", "--router", "2", **PACED)
    await ready(up.url)
    async with clients(up.url) as client:
        plain = await answer(client, request(1))
        several = await answer(client, request(2, n=3))
    asked = {
        "plain": request(1),
        "choices": request(2, n=3, stop=[several.text[0][4:10], several.text[1][40:46]]),
        "logprobs": request(3, logprobs=True, top_logprobs=2, n=2),
    }
    for seed in range(4, 7):
        asked[f"long list {seed}"] = request(seed, response_format=LONG_LIST)
        asked[f"list {seed}"] = request(seed, response_format=LIST)
        asked[f"person {seed}"] = request(seed, response_format=PERSON, n=2)
    stops = {TOKENS + at: plain.text[0][at : at + STOP_LENGTH] for at in range(6, 30)}
    asked |= {f"stop {most}": request(1, stop=[stop], max_tokens=most) for most, stop in stops.items()}
    expected = await answers(up.url, asked)
    before = await booked(up, 2 + len(asked))
    assert expected["choices"].finish[0] == "stop"
    assert all(expected[f"stop {most}"].finish == {0: "stop"} for most in stops)
    async with tap(up) as bus:
        submits = await bus.all_of("hr.submit.*")
        counts = {"plain": 0}

        async def faults() -> None:
            for name, pieces in (("d1", SEEN), ("d2", 3 * SEEN)):
                await until(lambda pieces=pieces: counts["plain"] >= pieces, 60.0)  # type: ignore[misc]
                await back(up, name, kill(up, name))

        told = await answers(up.url, asked, counts, faults)
        resumed = [job for msg in submits if (job := decode(msg.data, Job)).resume]
        await bus.operator.assert_clean()
    assert told == expected
    after = await booked(up, 2 + 2 * len(asked))
    assert after == before + Counter((said.usage["prompt_tokens"], said.usage["completion_tokens"]) for said in told.values())
    assert any(job.n == 3 and 0 < len(job.open_choices) < 3 for job in resumed), "no choice was done when its worker died"
    assert any(job.sampling.logprobs is not None for job in resumed)
    assert any(job.sampling.grammar is not None for job in resumed)
    assert any(_half_matched(job, stops[job.sampling.max_tokens]) for job in resumed if job.sampling.max_tokens in stops)


def _half_matched(job: Job, stop: str) -> bool:
    """What the job has generated ends with the beginning of its stop string."""
    text = Tokenizer.from_str(tiny_tokenizer_json()).decode(list(job.choices[0].generated))
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))


async def booked(up: Up, entries: int) -> Counter[tuple[int, int]]:
    """(prompt, completion) tokens of each request that the ledger has, once there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with closing(sqlite3.connect(up.home / "edge.db", PATIENCE_S)) as connection:
                rows = connection.execute("SELECT prompt_tokens, completion_tokens FROM usage").fetchall()
            if len(rows) >= entries:
                return Counter(rows)
            await asyncio.sleep(0.05)


async def answers(
    url: str,
    asked: dict[str, dict[str, Any]],
    counts: dict[str, int] | None = None,
    during: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Said]:
    """What each of these is answered, all asked at once; `counts`: the pieces that came of each so far."""
    counts = {} if counts is None else counts

    def count(name: str) -> Callable[[], None]:
        def heard() -> None:
            counts[name] = counts.get(name, 0) + 1

        return heard

    async with clients(url) as client, asyncio.TaskGroup() as group:
        asking = {name: group.create_task(answer(client, body, count(name))) for name, body in asked.items()}
        if during is not None:
            await during()
    return {name: task.result() for name, task in asking.items()}
