"""The ledger and budgets: each entry once, no budget given out twice, what a dead edge held comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest
import sqlalchemy as sa

from services.edge.gate import windows
from services.edge.gate.purse import Ask
from services.edge.gate.records import Entry, Used
from services.edge.store import usage as module
from services.edge.store.database import Database
from services.edge.store.tables import allotments, budgets, usage
from services.edge.store.usage import SqlUsageStore

E1, E2 = "e1-0k3v9x00abcde", "e2-0k3v9x00abcde"
OWNER, WINDOW = "tenant-acme", "day-2026-11-29"
LEASE_S = 15.0
LAPSED = -1.0


def entry(job: int, tokens: int = 10) -> Entry:
    return Entry("acme", "k", Used(f"{job:032x}", "m", tokens - 1, 1, cached_tokens=3, compute_s=0.25, cost=0.5))


def ask(want: int = 0, keep: int = 0, limit: int = 100, charges: Mapping[str, int] | None = None) -> Ask:
    return Ask(OWNER, WINDOW, limit, keep, want, charges or {})


class Edge:
    def __init__(self, database: Database, name: str = E1) -> None:
        self._store = SqlUsageStore(database)
        self._name = name

    async def get(self, one: Ask, *entries: Entry, lease_s: float = LEASE_S) -> tuple[int, int]:
        got = (await self._store.exchange(self._name, entries, [one], lease_s))[OWNER, WINDOW]
        return got.granted, got.spent


async def taken(database: Database) -> int:
    async with database.read() as connection:
        return int((await connection.execute(sa.select(budgets.c.taken))).scalar_one())


async def test_an_entry_is_booked_once_whoever_brings_it(database: Database) -> None:
    edges = [SqlUsageStore(database) for _ in range(4)]
    await asyncio.gather(*(edge.exchange(E1, [entry(1), entry(2), entry(at + 3)], [], LEASE_S) for at, edge in enumerate(edges)))
    async with database.read() as connection:
        rows = (await connection.execute(sa.select(usage).order_by(usage.c.job))).mappings().all()
    assert [row["job"] for row in rows] == [f"{job:032x}" for job in range(1, 7)]
    row = rows[0]
    assert (row["tenant"], row["key"], row["model"], row["prompt_tokens"], row["completion_tokens"]) == ("acme", "k", "m", 9, 1)
    assert (row["cached_tokens"], row["compute_s"], row["cost"]) == (3, 0.25, 0.5)


async def test_a_long_name_stops_no_ledger(database: Database) -> None:
    """An account of NATS may be called anything; a row that cannot be written would hold up all others."""
    one = Entry("nats:" + "a" * 1000, "", Used("a" * 32, "m" * 1000, 1, 1))
    await SqlUsageStore(database).exchange(E1, [one], [], LEASE_S)
    async with database.read() as connection:
        assert (await connection.execute(sa.select(sa.func.count()).select_from(usage))).scalar_one() == 1


async def test_what_is_there_is_given_out_and_no_more(database: Database) -> None:
    first, second = Edge(database), Edge(database, E2)
    assert await first.get(ask(want=60)) == (60, 0)
    assert await second.get(ask(want=60)) == (40, 0)
    assert await first.get(ask(keep=10)) == (0, 0)
    assert await second.get(ask(keep=40, want=60)) == (50, 0)
    assert await taken(database) == 100


async def test_edges_that_ask_at_once(database: Database) -> None:
    edges = [Edge(database, f"e{number}-0k3v9x00abcde") for number in range(8)]
    got = await asyncio.gather(*(edge.get(ask(want=30)) for edge in edges))
    assert sum(granted for granted, _ in got) == 100


async def test_what_is_booked_stays_spent(database: Database) -> None:
    edge = Edge(database)
    await edge.get(ask(want=50))
    one = entry(1, 20)
    charged = ask(keep=30, charges={one.used.job: 20})
    for _ in range(2):  # the answer of the first may have been lost
        await edge.get(charged, one)
        assert await taken(database) == 50
    assert await edge.get(ask()) == (0, 20)
    assert await Edge(database, E2).get(ask(want=100)) == (80, 20)


async def test_what_another_edge_booked_is_not_charged_twice(database: Database) -> None:
    """A job that went on at another edge, and of which both report the end."""
    one = entry(1, 20)
    for name in (E1, E2):
        edge = Edge(database, name)
        await edge.get(ask(want=20))
        await edge.get(ask(charges={one.used.job: 20}), one)
    assert await taken(database) == 20


async def test_a_dead_edges_part_comes_back(database: Database) -> None:
    dead, other = Edge(database), Edge(database, E2)
    assert await dead.get(ask(want=100), lease_s=LAPSED) == (100, 0)
    assert await other.get(ask(want=70)) == (70, 0)
    # It was not dead, and two of its requests still run: they are counted, but nothing more is given.
    assert await dead.get(ask(keep=50, want=10)) == (0, 0)
    assert await taken(database) == 120


async def test_a_budget_may_be_made_smaller(database: Database) -> None:
    edge = Edge(database)
    await edge.get(ask(want=50))
    assert await edge.get(ask(keep=10, want=50, limit=20)) == (10, 0)
    assert await edge.get(ask(keep=20, want=50, limit=5)) == (0, 0)


async def test_what_is_old_is_forgotten_a_little_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SWEPT", 2)
    store = SqlUsageStore(database)
    await store.exchange(E1, [entry(job) for job in range(1, 6)], [], LEASE_S)
    async with database.write() as connection:
        old = usage.c.job.in_([f"{job:032x}" for job in range(1, 4)])
        await connection.execute(sa.update(usage).where(old).values(booked=usage.c.booked - 1000.0))
    assert [await store.sweep(500.0) for _ in range(3)] == [True, False, False]
    async with database.read() as connection:
        assert (await connection.scalars(sa.select(usage.c.job).order_by(usage.c.job))).all() == [f"{4:032x}", f"{5:032x}"]


async def test_budgets_are_forgotten_once_they_are_over_and_old(database: Database) -> None:
    """What a dead edge holds goes sooner, but never of a budget that still counts: it would be lost to it."""
    store, now = SqlUsageStore(database), time.time()
    day = 86_400.0
    names = {
        "today": windows.name(windows.DAY, now),
        "week": windows.name(windows.DAY, now - 7 * day),
        "long": windows.name(windows.DAY, now - 500 * day),
        "month": windows.name(windows.MONTH, now),
        "months": windows.name(windows.MONTH, now - 500 * day),
        "running": windows.RUNNING,
    }
    asks = [Ask(OWNER, name, 100, 0, 10, {}) for name in names.values()]
    await store.exchange(E1, [], asks, LAPSED)
    assert not await store.sweep(400 * day)
    async with database.read() as connection:
        kept = set((await connection.scalars(sa.select(budgets.c.window))).all())
        held = set((await connection.scalars(sa.select(allotments.c.window))).all())
    assert kept == set(names.values()) - {names["long"], names["months"]}
    assert held == {names["today"], names["month"], names["running"]}
