"""Budgets of several edges over one real database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from schemas.errors import EdgeUnavailable, HeadraceError, InsufficientQuota, RateLimited
from schemas.job import Tier
from services.edge.gate.budgets import Budgets, Hold
from services.edge.gate.purse import SLICES
from services.edge.gate.records import Caller, Used
from services.edge.gate.windows import DAY, RUNNING
from services.edge.store.database import Database
from services.edge.store.tables import allotments, budgets, usage
from services.edge.store.usage import SqlUsageStore
from services.edge.tenant import tenant
from services.telemetry.metrics import Metrics
from tests.edge.fakes import SECRET, OneMinute
from tests.waiting import until

OWNER = "tenant-acme"
CALLER = Caller(tenant(SECRET, "acme"), Tier.PAID, "k")
PATIENT_S = 20.0


@asynccontextmanager
async def edges(database: Database, count: int, metrics: Metrics | None = None) -> AsyncIterator[list[Budgets]]:
    store, told = SqlUsageStore(database), metrics or Metrics.null()
    made = [Budgets(store, f"e{number}-0k3v9x00abcde", OneMinute(), told, PATIENT_S) for number in range(count)]
    tasks = [asyncio.create_task(each.run()) for each in made]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in made:
            await each.close()


async def all_at_once(over: list[Budgets], kind: str, limit: int, amount: int, count: int) -> list[tuple[Budgets, Hold]]:
    """What `count` requests got that came to all edges at the same time."""

    async def one(edge: Budgets) -> tuple[Budgets, Hold] | None:
        try:
            return edge, await edge.take(kind, OWNER, limit, amount, Tier.PAID)
        except RateLimited:
            return None

    got = await asyncio.gather(*(one(over[number % len(over)]) for number in range(count)))
    return [each for each in got if each is not None]


@pytest.mark.parametrize(("kind", "limit", "amount"), [(RUNNING, 100, 1), (DAY, 10_000, 100)])
async def test_five_hundred_over_three_edges(database: Database, kind: str, limit: int, amount: int) -> None:
    async with edges(database, 3) as over:
        got = await all_at_once(over, kind, limit, amount, 500)
        slack = 2 * (limit // SLICES + amount - 1) * len(over)
        assert limit - slack <= amount * len(got) <= limit


async def test_a_place_is_free_again(database: Database) -> None:
    async with edges(database, 3) as over:
        for _ in range(5):
            ((edge, hold),) = await all_at_once(over, RUNNING, 1, 1, 20)
            edge.settle([hold], "", 0)
            async with asyncio.timeout(PATIENT_S):
                while await _amounts(database):  # noqa: ASYNC110 - the database tells nobody
                    await asyncio.sleep(0.01)


async def test_what_was_used_is_booked_and_the_rest_comes_back(database: Database) -> None:
    async with edges(database, 2) as over:
        used = 0
        for job in range(10):
            edge = over[job % 2]
            hold = await edge.take(DAY, OWNER, 1000, 90, Tier.PAID)
            edge.settle([hold], f"{job:032x}", 60)
            edge.book(CALLER, Used(f"{job:032x}", "m", 50, 10, compute_s=0.5, cost=0.25))
            used += 60
        await _until_refused(over[0], InsufficientQuota, amount=1000 - used + 1)
    assert not await _amounts(database)
    async with database.read() as connection:
        row = (await connection.execute(sa.select(budgets.c.spent, budgets.c.taken))).one()
        rows = (await connection.execute(sa.select(sa.func.count(), sa.func.sum(usage.c.cost)))).one()
    assert (tuple(row), tuple(rows)) == ((600, 600), (10, 2.5))


async def test_the_database_is_locked(sqlite: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """faults.md, gateway: quota store down (the database): paid spend what their edge holds, then 503, free 503 at once; an
    alarm; afterwards what was used meanwhile is charged, once."""
    limit, metrics, jobs = 100 * SLICES, Metrics.collecting("e1"), list[str]()
    async with edges(sqlite, 1, metrics) as (edge,):

        async def one_request() -> None:
            hold = await edge.take(DAY, OWNER, limit, 10, Tier.PAID)
            jobs.append(f"{len(jobs):032x}")
            edge.settle([hold], jobs[-1], 10)
            edge.book(CALLER, Used(jobs[-1], "m", 5, 5))

        await one_request()
        with closing(sqlite3.connect(tmp_path / "edge.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with asyncio.timeout(PATIENT_S):
                while not await _refused(one_request()):
                    pass
            assert 10 * len(jobs) <= 3 * (limit // SLICES)
            await until(lambda: edge.down)
            with pytest.raises(EdgeUnavailable):
                await edge.take(DAY, OWNER, limit, 1, Tier.FREE)
            assert b'headrace_store_failures_total{operation="usage"} ' in metrics.prometheus_text()
            assert "usage is not booked" in caplog.text
        used = (10 * len(jobs), len(jobs), 10 * len(jobs))
        async with asyncio.timeout(PATIENT_S):
            while await _booked(sqlite) != used:  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.02)
    assert await _booked(sqlite) == used


async def _refused(request: Awaitable[None]) -> bool:
    try:
        await request
    except EdgeUnavailable:
        return True
    return False


async def _booked(database: Database) -> tuple[int, int, int]:
    """What the budget has spent; the ledger's rows, and their tokens."""
    async with database.read() as connection:
        tokens = sa.func.sum(usage.c.prompt_tokens + usage.c.completion_tokens)
        spent = await connection.scalar(sa.select(budgets.c.spent))
        return spent or 0, *(await connection.execute(sa.select(sa.func.count(), tokens))).one()


async def _until_refused(edge: Budgets, error: type[HeadraceError], amount: int) -> None:
    """Other edges' usage is known once they have booked it."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            try:
                await edge.take(DAY, OWNER, 1000, amount, Tier.PAID)
            except error:
                return
            except RateLimited:
                await asyncio.sleep(0.01)


async def _amounts(database: Database) -> list[int]:
    async with database.read() as connection:
        return list((await connection.scalars(sa.select(allotments.c.amount))).all())
