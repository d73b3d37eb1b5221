"""The whole pipeline as real processes over a real nats-server with its permissions, scripted engines, through HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from random import Random
from typing import Any

import httpx
import pytest

from schemas.identity import is_process
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

SLOW_PREFILL = {"HEADRACE_SCRIPTED__PREFILL_TOKEN_S": "0.2", "HEADRACE_WORKER__STEP_TOKENS": "16"}
SLOW_DECODE = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05"}
BIG_BLOCKS = {
    # A handoff of a few of these blocks takes long enough to be met in the middle.
    "HEADRACE_SCRIPTED__BLOCK_BYTES": str(32 * 2**20),
    "HEADRACE_WORKER__KV_BLOCKS": "16",
}


def body(content: str = "hello world", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def http(up: Up) -> httpx.AsyncClient:
    """To its API. Reading the certificates that nobody shows here takes 30 ms a client, and each request has one of its own."""
    return httpx.AsyncClient(base_url=up.url, timeout=60, verify=False)


async def chat(up: Up, content: str, **fields: Any) -> dict[str, Any]:
    async with http(up) as client:
        answer = await client.post("/v1/chat/completions", json=body(content, **fields))
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]


async def streamed(up: Up, content: str, **fields: Any) -> str:
    text = ""
    async with (
        http(up) as client,
        client.stream("POST", "/v1/chat/completions", json=body(content, stream=True, **fields)) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


async def hang_up(up: Up, after: Awaitable[object], *, stream: bool, content: str = "hello world", max_tokens: int = 400) -> None:
    """Ask, and close the connection when `after` is over."""
    async with http(up) as client:
        asked = asyncio.create_task(
            client.post("/v1/chat/completions", json=body(content, stream=stream, max_tokens=max_tokens, ignore_eos=True))
        )
        leaving = asyncio.ensure_future(after)
        await asyncio.wait([asked, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in (asked, leaving):
            task.cancel()
        await asyncio.wait([asked, leaving])


async def test_streamed_and_not_streamed_are_the_same(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    whole = await chat(up, "one two three", max_tokens=40)
    assert whole["usage"]["completion_tokens"] <= 40
    assert await streamed(up, "one two three", max_tokens=40) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("arguments", [("--prefill", "2", "--decode", "2"), ("--both", "1")])
async def test_other_shapes_give_the_same_tokens(scripted_stack: StartScripted, arguments: tuple[str, ...]) -> None:
    prompts = [f"prompt {number} " + "x" * number for number in range(8)]
    expected = [await chat(scripted_stack(), prompt, max_tokens=30) for prompt in prompts]
    up = scripted_stack(*arguments)
    got = await asyncio.gather(*(chat(up, prompt, max_tokens=30) for prompt in prompts))
    assert [answer["choices"] for answer in got] == [answer["choices"] for answer in expected]


async def test_stops_over_a_handoff_are_those_of_one_engine(scripted_stack: StartScripted) -> None:
    """Case 7: every (stop, stream) gives the same bytes through prefill, handoff and decode as in a single process."""
    alone, apart = scripted_stack("--both", "1"), scripted_stack()
    text = (await chat(alone, "stop me", max_tokens=40, ignore_eos=True))["choices"][0]["message"]["content"]
    stops = [text[at : at + length] for at in (0, 1, len(text) // 2, len(text) - 4) for length in (1, 2, 4)]
    for stop in [*stops, "never said"]:
        for keep in (False, True):
            fields = {"max_tokens": 40, "ignore_eos": True, "stop": [stop], "include_stop_str_in_output": keep}
            whole = [(await chat(up, "stop me", **fields))["choices"][0] for up in (alone, apart)]
            cut = text.partition(stop)
            assert whole[0] == whole[1]
            assert whole[0]["message"]["content"] == cut[0] + (cut[1] if keep else "")
            assert whole[0]["finish_reason"] == ("stop" if cut[1] else "length")
            assert [await streamed(up, "stop me", **fields) for up in (alone, apart)] == [whole[0]["message"]["content"]] * 2


async def test_sixteen_chats_at_once_get_the_tokens_they_get_alone(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    prompts = [f"chat {number} " + "y" * (3 * number) for number in range(16)]
    alone = [await chat(up, prompt, max_tokens=10 + 5 * number) for number, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(chat(up, prompt, max_tokens=10 + 5 * number) for number, prompt in enumerate(prompts)))
    assert [answer["choices"] for answer in together] == [answer["choices"] for answer in alone]
    counts = [[answer["usage"]["completion_tokens"] for answer in answers] for answers in (together, alone)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no-stream"])
async def test_hanging_up_while_prefilling(scripted_stack: StartScripted, stream: bool) -> None:
    """faults.md, gateway: client closes, prefill; stream and non-stream, as below. Half-close, stalled reader: test_abuse.py."""
    up = scripted_stack(**SLOW_PREFILL)
    async with operator(up) as op:
        seen = asyncio.Event()
        asked = asyncio.create_task(hang_up(up, seen.wait(), stream=stream, content="long" * 20))
        await op.until(lambda found: any(s["runs"] for i, s in found.items() if i.startswith("p")))
        seen.set()
        await asked
        await op.assert_clean()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no-stream"])
async def test_hanging_up_while_queued(scripted_stack: StartScripted, stream: bool) -> None:
    """faults.md, gateway: client closes, queued."""
    up = scripted_stack(**SLOW_PREFILL)
    async with operator(up) as op:
        router, seen = await op.one("router"), asyncio.Event()
        # The first computes, the second fills the worker's own queue, the others wait in JetStream.
        asked = [asyncio.create_task(hang_up(up, seen.wait(), stream=stream, content=f"{n}" * 40)) for n in range(5)]
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not _waiting(await op.ask(f"hr.admin.router.{router}.status")):
            assert asyncio.get_running_loop().time() < deadline, "no job waited in the queue"
        seen.set()
        await asyncio.gather(*asked)
        await op.assert_clean()
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while _waiting(await op.ask(f"hr.admin.router.{router}.status")):
            assert asyncio.get_running_loop().time() < deadline, "a cancelled job stayed in the queue"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no-stream"])
async def test_hanging_up_while_decoding(scripted_stack: StartScripted, stream: bool) -> None:
    """faults.md, gateway: client closes, decode."""
    up = scripted_stack(**SLOW_DECODE)
    async with operator(up) as op:
        seen = asyncio.Event()
        asked = asyncio.create_task(hang_up(up, seen.wait(), stream=stream))
        await op.until(lambda found: any(s["runs"] for i, s in found.items() if i.startswith("d")))
        seen.set()
        await asked
        await op.assert_clean()


async def test_hanging_up_while_handing_off(scripted_stack: StartScripted) -> None:
    """faults.md, gateway: client closes, handoff. Many, each a little later than the one before, so that some meet it in the
    middle."""
    up = scripted_stack(**BIG_BLOCKS)
    async with operator(up) as op:
        for step in range(24):
            await hang_up(up, asyncio.sleep(0.01 * step), stream=bool(step % 2), content="z" * 60)
        await op.assert_clean()
        assert (await chat(up, "still there?", max_tokens=3))["usage"]["completion_tokens"] <= 3


async def test_hanging_up_at_any_moment(scripted_stack: StartScripted) -> None:
    up = scripted_stack("--prefill", "2", "--decode", "2")
    random = Random(11)
    async with operator(up) as op:
        for _ in range(8):
            await asyncio.gather(
                *(
                    hang_up(
                        up,
                        asyncio.sleep(random.uniform(0, 0.08)),
                        stream=random.random() < 0.5,
                        content="w" * random.randrange(1, 90),
                    )
                    for _ in range(8)
                )
            )
        await op.assert_clean()


async def test_operators_read_a_worker_s_metrics(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    async with operator(up) as op:
        await chat(up, "count me", max_tokens=3)
        worker = await op.one("prefill")
        text = (await op.client.request(f"hr.admin.prefill.{worker}.metrics", b"", timeout=PATIENCE_S)).data.decode()
        assert "headrace_kv_blocks_total" in text
        assert "headrace_kv_blocks_orphaned 0.0" in text
        assert 'headrace_handoffs_total{outcome="released"}' in text


async def test_operators_see_every_service(scripted_stack: StartScripted) -> None:
    up = scripted_stack()
    async with operator(up) as op:
        for service in ("router", "prefill", "decode"):
            assert is_process(await op.one(service))


def _waiting(status: dict[str, Any]) -> int:
    return sum(sum(model["waiting"].values()) for model in status["models"].values())
