"""What a detached job used is booked in the transaction that ends its row: once, whichever edge writes that."""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa

from services.edge.gate.purse import Ask
from services.edge.gate.records import Bill
from services.edge.store.database import Database
from services.edge.store.jobs import SqlJobStore
from services.edge.store.records import Checkpoint, End, Facts, JobState, Retention, Standing
from services.edge.store.tables import budgets, detached_jobs, usage
from services.edge.store.usage import SqlUsageStore
from tests.edge.store.test_jobs import E1, E2, E3, JOB, LAPSED, LEASE_S, OTHER, chunk

DAY, MONTH = ("key-k", "day-2026-11-29"), ("tenant-acme", "month-2026-11")
BILL = Bill(model="m", prompt_tokens=10, key="k", price=2.0, budgets=(DAY, MONTH))
FINISHED = End(JobState.FINISHED)


async def create(store: SqlJobStore, job: str = JOB, bill: Bill | None = BILL, lease_s: float = LEASE_S) -> None:
    await store.create(job, "acme", b"request", E1, lease_s, bill)


def end(*tokens: int, end: End = FINISHED, first: int = 0, job: str = JOB, facts: Facts | None = None) -> Checkpoint:
    chunks = (chunk(first, *tokens),) if tokens else ()
    return Checkpoint(job, facts or Facts(cached_tokens=4, compute_s=0.5), chunks, end)


async def ledger(database: Database) -> list[dict[str, Any]]:
    async with database.read() as connection:
        rows = (await connection.execute(sa.select(usage).order_by(usage.c.job))).mappings().all()
    return [{name: value for name, value in row.items() if name != "booked"} for row in rows]


async def spent(database: Database) -> dict[tuple[str, str], tuple[int, int]]:
    async with database.read() as connection:
        return {(row.owner, row.window): (row.spent, row.taken) for row in (await connection.execute(sa.select(budgets))).all()}


async def exchange(database: Database, *, want: int = 0, keep: int = 0) -> int:
    """Of an edge that is allotted some of both budgets; what it got of the day's."""
    asks = [Ask(owner, window, 1000, keep, want, {}) for owner, window in (DAY, MONTH)]
    return (await SqlUsageStore(database).exchange(E1, [], asks, LEASE_S))[DAY].granted


async def test_the_end_of_a_row_is_the_entry_in_the_ledger(database: Database, store: SqlJobStore) -> None:
    await create(store)
    assert await exchange(database, want=100) == 100
    await store.checkpoint(E1, [Checkpoint(JOB, Facts(), (chunk(0, 1, 2), chunk(0, 7, choice=1)))], LEASE_S)
    assert not await ledger(database), "it still runs"
    done = await store.checkpoint(E1, [end(3, first=2)], LEASE_S)
    (row,) = await ledger(database)
    expected = {"tenant": "acme", "key": "k", "model": "m", "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 4}
    assert row == {"job": JOB, **expected, "compute_s": 0.5, "cost": 1.0}
    assert [entry.used.tokens for entry in done.booked] == [14]
    assert await spent(database) == {DAY: (14, 114), MONTH: (14, 114)}, "until its edge lets go of what the job was promised"
    await exchange(database)
    assert await spent(database) == {DAY: (14, 14), MONTH: (14, 14)}


async def test_a_checkpoint_that_is_repeated_books_once(database: Database, store: SqlJobStore) -> None:
    await create(store)
    await exchange(database, want=1)
    assert (await store.checkpoint(E1, [end(1, 2)], LEASE_S)).booked
    assert not (await store.checkpoint(E1, [end(1, 2)], LEASE_S)).booked
    assert len(await ledger(database)) == 1
    assert (await spent(database))[DAY][0] == 12


async def test_whoever_adopted_it_books_what_both_received(database: Database, store: SqlJobStore) -> None:
    await create(store, lease_s=LAPSED)
    await store.checkpoint(E1, [Checkpoint(JOB, Facts(compute_s=0.25), (chunk(0, 1, 2, 3),), release=True)], LEASE_S)
    (adopted,) = await store.adopt(E2, [], LEASE_S, 1)
    assert adopted.facts.compute_s == 0.25
    late = await store.checkpoint(E1, [end(4, first=3)], LEASE_S)
    assert (late.standings[JOB], late.booked, await ledger(database)) == (Standing.TAKEN, [], [])
    await store.checkpoint(E2, [end(4, 5, first=3)], LEASE_S)
    (row,) = await ledger(database)
    assert (row["completion_tokens"], row["compute_s"], row["cost"]) == (5, 0.5, 1.0)


async def test_of_edges_that_race_one_books(database: Database, store: SqlJobStore) -> None:
    names = [f"{number:032x}" for number in range(20)]
    await exchange(database, want=1)
    for name in names:
        await create(store, name, lease_s=LAPSED)

    async def finish(edge: str) -> None:
        for row in await store.adopt(edge, [], LEASE_S, 20):
            await store.checkpoint(edge, [end(1, 2, job=row.job)], LEASE_S)
        await store.checkpoint(edge, [end(1, 2, job=name) for name in names], LEASE_S)  # what it has not is not written

    await asyncio.gather(*(finish(edge) for edge in (E2, E3) * 3))
    assert [row["job"] for row in await ledger(database)] == names
    assert (await spent(database))[DAY][0] == 20 * 12


async def test_several_that_end_together_are_charged_together(database: Database, store: SqlJobStore) -> None:
    await exchange(database, want=1)
    await create(store)
    await create(store, OTHER)
    await store.checkpoint(E1, [end(1, 2), end(3, job=OTHER)], LEASE_S)
    assert (await spent(database))[DAY][0] == 12 + 11


async def test_who_failed_before_the_first_token_pays_nothing(database: Database, store: SqlJobStore) -> None:
    failed = End(JobState.FAILED, "deadline_exceeded", "too late")
    await create(store)
    await create(store, OTHER)
    await store.checkpoint(E1, [end(end=failed), end(1, 2, 3, end=failed, job=OTHER)], LEASE_S)
    assert [(row["job"], row["completion_tokens"]) for row in await ledger(database)] == [(OTHER, 3)]


async def test_who_is_cancelled_before_anybody_began_pays_nothing(database: Database, store: SqlJobStore) -> None:
    cancelled = End(JobState.CANCELLED)
    await create(store)
    await create(store, OTHER)
    await store.checkpoint(E1, [end(end=cancelled), end(end=cancelled, job=OTHER, facts=Facts(owned=True))], LEASE_S)
    assert [(row["job"], row["prompt_tokens"]) for row in await ledger(database)] == [(OTHER, 10)]


async def test_a_deleted_row_is_booked_before(database: Database, store: SqlJobStore) -> None:
    await create(store)
    await store.checkpoint(E1, [Checkpoint(JOB, Facts(), (chunk(0, 1, 2),))], LEASE_S)
    assert not await store.delete(JOB, "another tenant")
    assert not await ledger(database)
    assert await store.delete(JOB, "acme")
    assert [row["completion_tokens"] for row in await ledger(database)] == [2]


async def test_one_that_ended_and_is_deleted_is_booked_once(database: Database, store: SqlJobStore) -> None:
    await exchange(database, want=1)
    await create(store)
    await store.checkpoint(E1, [end(1, 2)], LEASE_S)
    await store.sweep(Retention(keep_s=-1))
    assert await store.delete(JOB, "acme")
    assert [row["completion_tokens"] for row in await ledger(database)] == [2]
    assert (await spent(database))[DAY][0] == 12


async def test_one_that_an_older_edge_ended_is_booked_when_it_is_emptied(database: Database, store: SqlJobStore) -> None:
    """It knows no bills; in a rolling upgrade it may adopt any row."""
    await create(store)
    await store.checkpoint(E1, [Checkpoint(JOB, Facts(), (chunk(0, 1, 2),))], LEASE_S)
    async with database.write() as connection:
        await connection.execute(sa.update(detached_jobs).values(state=JobState.FINISHED, ended=1.0))
    for _ in range(2):
        await store.sweep(Retention(keep_s=-1))
        assert [row["completion_tokens"] for row in await ledger(database)] == [2]


async def test_one_that_never_was_is_not_booked(database: Database, store: SqlJobStore) -> None:
    await create(store)
    assert await store.delete(JOB, "acme", booked=False)
    await create(store, OTHER, bill=None)
    await store.checkpoint(E1, [end(1, job=OTHER)], LEASE_S)
    assert not await ledger(database)


async def test_a_holder_and_who_deletes_it_do_not_wait_for_each_other_in_a_circle(database: Database, store: SqlJobStore) -> None:
    await exchange(database, want=1)
    names = [f"{number:032x}" for number in range(10)]
    for name in names:
        await create(store, name)
    await store.checkpoint(E1, [Checkpoint(name, Facts(owned=True)) for name in names], LEASE_S)
    await asyncio.gather(
        *(store.checkpoint(E1, [end(1, job=name)], LEASE_S) for name in names), *(store.delete(name, "acme") for name in names)
    )
    assert [row["job"] for row in await ledger(database)] == names
    total = sum(row["prompt_tokens"] + row["completion_tokens"] for row in await ledger(database))
    assert (await spent(database))[DAY][0] == total
