"""What one tenant learns of another one, and what operators' eyes and the outside get to see, over real processes."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up
from tests.e2e.test_budgets import ask, headrace
from tests.e2e.test_scripted import body

TALKATIVE = {"HEADRACE_LOG_LEVEL": "DEBUG"}
ROLES = ("edge", "router", "prefill", "decode")


async def cached(up: Up, key: str, content: str) -> int:
    answer = await ask(up, key, content=content, max_tokens=3)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_cached_tokens_are_of_ones_own_prefixes_only(scripted_stack: StartScripted) -> None:
    """faults.md, privacy: a tenant that probes another one's prefix finds nothing cached: each has a salt of its own. Two keys of
    one tenant share."""
    up = scripted_stack(**TALKATIVE)
    first, again, other = (headrace(up, "keys", "create", "--tenant", name) for name in ("acme", "acme", "globex"))
    prompt = "the same long beginning of a prompt, word for word, " * 3
    assert await cached(up, first, prompt) == 0
    own = await cached(up, first, prompt)
    assert own > 0
    assert [await cached(up, other, prompt) for _ in range(2)] == [0, own]
    assert await cached(up, again, prompt) == own
    assert [await cached(up, "none", prompt) for _ in range(2)] == [0, own], "whoever has no key is a tenant too"


async def test_nothing_of_a_prompt_or_a_key_is_seen_elsewhere(scripted_stack: StartScripted) -> None:
    """faults.md, privacy: logs, metrics and error bodies, at their most talkative, after answers and refusals."""
    up = scripted_stack(**TALKATIVE)
    word, key = f"canary{secrets.token_hex(8)}", headrace(up, "keys", "create", "--tenant", "canaries")
    async with operator(up) as op, httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        client.headers["authorization"] = f"Bearer {key}"
        answer = await client.post("/v1/chat/completions", json=body(word, max_tokens=30, ignore_eos=True))
        said = answer.json()["choices"][0]["message"]["content"]
        for path, fields in _answered(word):
            assert (await client.post(path, json={"model": "tiny", **fields})).status_code == 200, path
        for path, fields in _refused(word):
            refused = await client.post(path, json={"model": "tiny", **fields})
            assert 400 <= refused.status_code < 500, path
            assert word not in refused.text
            assert key[20:] not in refused.text
        broken = await client.post("/v1/chat/completions", content=f'{{"messages": [{{"content": "{word}'.encode())
        assert (broken.status_code, word in broken.text) == (400, False)
        with suppress(httpx.TimeoutException):
            await client.post("/v1/chat/completions", json=body(word, max_tokens=400, ignore_eos=True, n=4), timeout=0.05)
        await op.assert_clean()
        seen = await _seen(up, op)
    assert "headrace_requests_total" in seen
    assert "DEBUG" in seen
    for secret in (word, key, key[20:], json.dumps(said)[1:-1]):
        assert secret not in seen


def _answered(word: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": word}], "stream": True, "user": word, "max_tokens": 5},
        ),
        ("/v1/completions", {"prompt": word, "max_tokens": 5}),
        ("/v1/responses", {"input": word, "max_output_tokens": 5, "metadata": {"a": word}}),
        ("/v1/responses", {"input": word, "max_output_tokens": 5, "background": True}),
        ("/v1/conversations", {"items": [{"role": "user", "content": word}]}),
        ("/tokenize", {"prompt": word}),
    ]


def _refused(word: str) -> list[tuple[str, dict[str, Any]]]:
    message = {"role": "user", "content": word}
    chat = "/v1/chat/completions"
    return [
        (chat, {"messages": [message], "temperature": 9}),
        (chat, {"messages": [message, {"role": "alien", "content": word}]}),
        (chat, {"messages": [{"role": "user", "content": word * 100}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": word}}]}]}),
        (chat, {"messages": [message], "tools": [{"type": "function", "function": {"name": "f", "parameters": word}}]}),
        (chat, {"messages": [{"role": "tool", "content": word}]}),
        (chat, {"messages": [message], "stop": [word] * 20}),
        ("/v1/completions", {"prompt": word, "n": 10_000}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": word}]}),
        ("/tokenize", {"messages": [{"role": word}], "prompt": word}),
    ]


async def _seen(up: Up, op: Operator) -> str:
    """Every log, and the metrics of every process."""
    logs = [path.read_text(errors="replace") for path in (up.home / "logs").iterdir()]
    return "\n".join([up.output, *logs, *(await asyncio.gather(*(op.metrics(role) for role in ROLES)))])


async def test_what_operators_see_is_out_of_the_callers_reach(scripted_stack: StartScripted) -> None:
    """faults.md, privacy: metrics, admin and debug ports from the public side -> refused. They listen on 127.0.0.1 alone, so
    another address of this machine is as far away as another machine; and the callers' port has none of it."""
    up = scripted_stack(**TALKATIVE)
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        for path in ("/metrics", "/admin", "/debug", "/debug/pprof", "/varz", "/connz", "/status", "/stats"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get(f"{up.admin_url}/metrics")).status_code == 200
    admin = int(up.admin_url.rpartition(":")[2])
    for port in (admin, up.nats_port, *_monitoring(up)):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)


def _monitoring(up: Up) -> list[int]:
    """NATS's own page."""
    lines = (up.home / "nats" / "nats-server.conf").read_text().splitlines()
    return [int(line.rpartition(":")[2].strip(' "')) for line in lines if line.startswith("http:")]
