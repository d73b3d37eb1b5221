"""Prefix caches over real processes: what a second turn reports, and what routers hear of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import nats

from schemas.codec import decode, encode
from schemas.kvevents import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.subjects import Subjects
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S, until

SUBJECTS = Subjects()


async def chat(up: Up, *contents: str) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 20}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]


async def test_a_second_turn_reports_what_was_cached_and_changes_no_token(scripted_stack: StartScripted) -> None:
    cached, plain = scripted_stack(), scripted_stack(HEADRACE_WORKER__PREFIX_CACHE="false")
    question = "what is it that we talk about? " * 4
    first = await chat(cached, question)
    turns = (question, first["choices"][0]["message"]["content"], "and then?")
    second = await chat(cached, *turns)
    details = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert details[0] < details[1] < second["usage"]["prompt_tokens"]
    expected = await chat(plain, *turns)
    assert expected["choices"] == second["choices"]
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    async with operator(cached) as op:
        await op.assert_clean()
        assert all(status["kv"]["cached"] for status in (await op.workers()).values())


async def test_a_router_hears_what_is_cached(scripted_stack: StartScripted) -> None:
    """As the role `router`, so with its permissions."""
    up = scripted_stack("--prefill", "2")
    password = json.loads((up.home / "nats" / "passwords.json").read_text())["router"]
    heard: dict[str, set[bytes]] = {}

    async def take(msg: nats.aio.msg.Msg) -> None:
        batch = decode(msg.data, KvEvents)
        known = heard.setdefault(batch.process, set())
        known |= set(batch.stored)
        known -= set(batch.removed)

    client = await nats.connect(
        f"nats://127.0.0.1:{up.nats_port}", user="router", password=password, inbox_prefix="_INBOX.router.test"
    )
    try:
        await client.subscribe(SUBJECTS.kv_events_any(), cb=take)
        await client.flush()
        for number in range(6):
            await chat(up, f"number {number} of several questions that are long enough for a block")
        await until(lambda: len(heard) == 3, what="a batch of each worker, changes or not")
        async with operator(up) as op:
            await op.assert_clean()
            statuses = await op.workers()
        await until(lambda: all(len(heard[worker]) == status["kv"]["cached"] for worker, status in statuses.items()))
        for worker in statuses:
            request = encode(KvSnapshotRequest())
            snapshot = decode((await client.request(SUBJECTS.kv_snapshot(worker), request, timeout=PATIENCE_S)).data, KvSnapshot)
            assert snapshot.pages == 1
            assert set(snapshot.hashes) == heard[worker]
    finally:
        await client.close()
