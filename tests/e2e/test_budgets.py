"""Keys with budgets, cost and the ledger, through real processes: what workers measured ends in the database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.running import ROOT, Up
from tests.e2e.test_scripted import body
from tests.waiting import PATIENCE_S, until

PRICE = 0.001
DAY_S = 86_400
SETTINGS = {"HEADRACE_EDGE__PRICE_PER_COMPUTE_S": str(PRICE), "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.005"}


def headrace(up: Up, *arguments: str) -> str:
    """What the command printed, on the stack's home."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_HOME": str(up.home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


async def ask(up: Up, key: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=up.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
        return await client.post("/v1/chat/completions", json=body(**fields))


async def checked(up: Up, key: str, **fields: Any) -> httpx.Response:
    """As `ask`; whoever hears that its limits cannot be checked now, because a disk is slow, comes again."""
    async with asyncio.timeout(4 * PATIENCE_S):
        while (answer := await ask(up, key, **fields)).status_code == 503:
            assert answer.headers["retry-after"] == "1"
            await asyncio.sleep(0.1)
        return answer


async def ledger(up: Up, tenant: str, rows: int) -> list[dict[str, Any]]:
    """The tenant's rows, once there are so many."""
    async with asyncio.timeout(4 * PATIENCE_S):
        while True:
            connection = sqlite3.connect(up.home / "edge.db")
            connection.row_factory = sqlite3.Row
            found = [dict(row) for row in connection.execute("SELECT * FROM usage WHERE tenant = ? ORDER BY booked", (tenant,))]
            connection.close()
            if len(found) >= rows:
                return found
            await asyncio.sleep(0.05)


async def test_what_was_measured_is_priced_and_booked(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SETTINGS)
    key = headrace(up, "keys", "create", "--tenant", "priced")
    answer = await ask(up, key, max_tokens=20, ignore_eos=True)
    usage = answer.json()["usage"]
    (row,) = await ledger(up, "priced", 1)
    assert f"chatcmpl-{row['job']}" == answer.json()["id"]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row["compute_s"] > 0.05  # a step takes 5 ms, and nobody else shared it
    assert usage["cost"] == row["cost"] == pytest.approx(row["compute_s"] * PRICE)


async def test_a_budget_is_spent_and_no_more(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**SETTINGS)
    await until(lambda: time.time() % DAY_S < DAY_S - 60, 90)  # after midnight there is a new one
    size = (await ask(up, headrace(up, "keys", "create", "--tenant", "big"), max_tokens=10, ignore_eos=True)).json()["usage"]
    headrace(up, "tenants", "limit", "small", "--budget-day", str(3 * size["total_tokens"]))
    key = headrace(up, "keys", "create", "--tenant", "small")
    answers = await asyncio.gather(*(checked(up, key, max_tokens=10, ignore_eos=True) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 9
    last = await checked(up, key, max_tokens=10)
    assert (last.status_code, last.json()["error"]["code"]) == (429, "insufficient_quota")
    assert last.headers["x-should-retry"] == "false"
    assert len(await ledger(up, "small", 3)) == 3
