"""What was used is in the ledger once, with its cost, when the edge that took the job in is killed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from services.edge.store.records import JobState
from tests.chaos.detached import Reading, edges
from tests.chaos.processes import back, kill
from tests.chaos.streams import ready, until
from tests.chaos.test_detached import LONG, SLOW, STACK, STEP, all_have
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.test_budgets import headrace
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PRICE = 0.01
THREE_EDGES = ("--prefill", "2", "--decode", "2", "--edge", "3")
SETTINGS = {**STEP, "HEADRACE_EDGE__PRICE_PER_COMPUTE_S": str(PRICE)}
TOKENS = 150
TOTAL_S = 30.0
"""Less than a slow job of `LONG` tokens takes, and far more than its first ones."""


def rows(database: Path, question: str, *values: object) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(database, PATIENCE_S)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(question, values)]


def ledger(database: Path, tenant: str) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in rows(database, "SELECT * FROM usage WHERE tenant = ?", tenant)}


async def test_the_edge_that_took_it_in_is_killed(scripted_stack: StartScripted) -> None:
    """Two others race for its jobs; each is booked once, priced, and taken from the budget, by whoever ended it."""
    up = scripted_stack(*THREE_EDGES, **SETTINGS)
    headrace(up, "tenants", "limit", "acme", "--budget-day", "1000000", "--concurrent", "50")
    key = headrace(up, "keys", "create", "--tenant", "acme")
    urls = [f"http://127.0.0.1:{up.port + at}" for at in range(3)]
    clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) for url in urls]
    async with operator(up) as op, clients[0] as first, clients[1] as second:
        names = await asyncio.gather(*(_begin(first, up.model, number) for number in range(8)))
        await until(lambda: _tokens(up.home / "edge.db", names) > 8 * 10, 30.0)
        before = kill(up, "e1")
        ended = await asyncio.gather(*(_ended(second, name) for name in names))
        booked = ledger(up.home / "edge.db", "acme")
        assert sorted(booked) == sorted(name.removeprefix("resp_") for name in names)
        for response in ended:
            row = booked[response.id.removeprefix("resp_")]
            assert (row["prompt_tokens"], row["completion_tokens"]) == (response.usage.input_tokens, TOKENS)
            assert row["compute_s"] > 0
            assert row["cost"] == pytest.approx(row["compute_s"] * PRICE) == pytest.approx(response.usage.cost)
        spent = sum(row["prompt_tokens"] + row["completion_tokens"] for row in booked.values())
        budget = "SELECT spent, taken FROM budgets WHERE owner = 'tenant-acme' AND \"window\" LIKE 'day-%'"
        assert sum(row["spent"] for row in rows(up.home / "edge.db", budget)) == spent  # of two days, if midnight lies between
        await back(up, "e1", before)
        await ready(urls[0])
        await op.assert_clean()


async def test_every_edge_is_killed_and_nobody_adopts_it_in_time(scripted_stack: StartScripted, tmp_path: Path) -> None:
    """An edge that starts long after ends the jobs as too late, and books what they had used."""
    up = scripted_stack(*STACK, **SLOW)
    async with edges(up, tmp_path, "x1", "x2") as (first, second):
        jobs = [await first.submit(number, LONG, total_s=TOTAL_S) for number in range(4)]
        readings = [Reading() for _ in jobs]
        reading = [asyncio.create_task(second.read(job, into)) for job, into in zip(jobs, readings, strict=True)]
        await all_have(readings, 10)
        await asyncio.gather(first.kill(), second.kill(), *reading)
    assert not ledger(tmp_path / "edge.db", "t")
    old = "SELECT count(*) AS young FROM detached_jobs WHERE (julianday('now') - 2440587.5) * 86400.0 < created + ?"
    await until(lambda: rows(tmp_path / "edge.db", old, TOTAL_S) == [{"young": 0}], 2 * TOTAL_S)
    async with edges(up, tmp_path, "x3") as (third,):
        for job, had in zip(jobs, readings, strict=True):
            late = await third.read(job, Reading())
            assert late.error == "deadline_exceeded"
            assert late.tokens[: len(had.tokens)] == had.tokens
            async with asyncio.timeout(PATIENCE_S):
                while (await third.ask("find", job=job))["state"] != JobState.FAILED:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            assert ledger(tmp_path / "edge.db", "t")[job]["completion_tokens"] == len(late.tokens)


async def _begin(client: AsyncOpenAI, model: str, number: int) -> str:
    made = await client.responses.create(
        model=model,
        input=f"question {number}",
        background=True,
        temperature=0,
        max_output_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    return made.id


def _tokens(database: Path, names: Sequence[str]) -> int:
    """That the jobs of these responses have in the database."""
    jobs = [name.removeprefix("resp_") for name in names]
    found = rows(database, f"SELECT sum(count) AS sum FROM detached_tokens WHERE job IN ({','.join('?' * len(jobs))})", *jobs)
    return int(found[0]["sum"] or 0)


async def _ended(client: AsyncOpenAI, name: str) -> openai.types.responses.Response:
    async with asyncio.timeout(60):
        while (found := await client.responses.retrieve(name)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert found.status == "incomplete", found.error
    return found
