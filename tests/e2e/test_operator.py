"""What an operator does with running jobs, over a real nats-server with its permissions; what a caller is told who asks why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

SLOW = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05"}
ASKS = {"x-headrace-explain": "1"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True, **fields}


async def stream(up: Up) -> list[dict[str, Any]]:
    """Every event of one answer, to its end."""
    events = []
    async with (
        httpx.AsyncClient(base_url=up.url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return events


async def the_job(op: Operator, service: str, process: str) -> dict[str, Any]:
    """The only one that this process holds, once a worker decodes it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            jobs = (await op.ask(f"hr.admin.{service}.{process}.jobs"))["jobs"]
            if jobs and jobs[0]["state"] == "decoding":
                return dict(jobs[0])
            await asyncio.sleep(0.02)


async def gone(op: Operator, service: str, process: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await op.ask(f"hr.admin.{service}.{process}.jobs"))["total"]:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("where", ["edge", "router", "decode"])
async def test_a_job_is_ended_wherever_the_operator_asks(scripted_stack: StartScripted, where: str) -> None:
    up = scripted_stack(**SLOW)
    async with operator(up) as op:
        edge, decode = await op.one("edge"), await op.one("decode")
        reading = asyncio.create_task(stream(up))
        job = await the_job(op, "edge", edge)
        assert (job["worker"], job["edge"]) == (decode, edge)
        assert (await the_job(op, "decode", decode))["job"] == job["job"]
        said = await op.ask(f"hr.admin.{where}.{await op.one(where)}.cancel", job=job["job"])
        assert said == {"job": job["job"], "told": [edge] if where == "router" else []}
        events = await reading
        assert events[-1]["error"]["code"] == "cancelled"
        assert events[0]["choices"], "it had begun"
        await op.assert_clean(PATIENCE_S)
        await gone(op, "edge", edge)


async def test_who_asks_is_told_where_a_request_went_and_an_operator_hears_the_same(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SLOW)
    async with operator(up) as op, httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        prefill, decode = await op.one("prefill"), await op.one("decode")
        answer = await client.post("/v1/chat/completions", json=body(max_tokens=2), headers=ASKS)
        told = json.loads(answer.headers["x-headrace-explain"])
        assert told["outcome"] == "placed"
        assert told["decode"] == decode
        assert {one["process"] for one in told["candidates"]} <= {prefill, decode}
        assert told["why"]["ttft_s"] > 0
        said = await op.ask(f"hr.admin.router.{await op.one('router')}.explain", model="tiny", tokens=20)
        assert (said["outcome"], said["decode"]) == ("placed", decode)
        plain = await client.post("/v1/chat/completions", json=body(max_tokens=2))
        assert "x-headrace-explain" not in plain.headers


async def test_nothing_is_quarantined_and_nothing_can_be_lifted(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SLOW)
    async with operator(up) as op:
        subject = f"hr.admin.edge.{await op.one('edge')}.quarantine"
        assert await op.ask(subject) == {"held": {}, "total": 0, "cleared": [], "next": ""}
        assert (await op.ask(subject, clear="all"))["cleared"] == []
        assert (await op.ask(subject, clear="0" * 32))["error"]["code"] == "not_found"
