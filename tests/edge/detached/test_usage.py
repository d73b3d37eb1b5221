"""What a detached job used is in the ledger once, with its cost, whatever became of the edge that took it in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from schemas.errors import DeadlineExceeded, StoreUnavailable
from schemas.reply import FinishReason
from services.edge.gate.records import Bill
from services.edge.store.database import Database
from services.edge.store.records import JobState
from services.edge.store.tables import budgets, detached_jobs, usage
from tests.edge.cluster import until
from tests.edge.detached.rig import (
    CACHED,
    TENANT,
    TOKEN_S,
    TOTAL_S,
    Owner,
    Pair,
    attach,
    begun,
    long_draft,
    pair,
    read_all,
    state_is,
)

PRICE = 2.0
DAY = ("key-k", "day-2026-11-29")
PROMPT = long_draft().prompt_tokens
BILL = Bill(model="m", prompt_tokens=PROMPT, key="k", price=PRICE, budgets=(DAY,))


@pytest.fixture
async def edges(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path) as made:
        async with made.second.database.write() as connection:
            await connection.execute(sa.insert(budgets).values(owner=DAY[0], window=DAY[1], spent=0, taken=0))
        yield made


async def ledger(database: Database) -> list[dict[str, Any]]:
    async with database.read() as connection:
        return [dict(row) for row in (await connection.execute(sa.select(usage))).mappings().all()]


async def assert_booked(edges: Pair, job: str, tokens: int) -> None:
    """Once: in the ledger, with its cost, and from the budget."""
    (row,) = await ledger(edges.second.database)
    compute = tokens * TOKEN_S
    assert (row["job"], row["tenant"], row["key"], row["model"]) == (job, TENANT, "k", "m")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (PROMPT, CACHED, tokens)
    assert (row["compute_s"], row["cost"]) == (pytest.approx(compute), pytest.approx(compute * PRICE))
    async with edges.second.database.read() as connection:
        assert (await connection.execute(sa.select(budgets.c.spent, budgets.c.taken))).all() == [(PROMPT + tokens,) * 2]


async def test_it_ends_where_it_began(edges: Pair) -> None:
    over: list[int] = []
    job, owner = await begun(edges, bill=BILL, over=over.append)
    owner.go_on(4, FinishReason.STOP)
    await state_is(edges, job, JobState.FINISHED)
    await assert_booked(edges, job, 7)
    await until(lambda: over == [PROMPT + 7])


async def test_its_edge_dies_and_its_run_goes_on(edges: Pair) -> None:
    """What the dead edge heard of the run's compute is not added to what the next one hears of the same run."""
    job, owner = await begun(edges, bill=BILL)
    await edges.first.kill()
    owner.go_on(5)  # nobody hears
    await until(lambda: len(edges.second.detached) == 1)
    owner.go_on(2, FinishReason.STOP)
    reader = await attach(edges.second, job)
    assert (await read_all(reader))[0] == owner.tokens()
    await state_is(edges, job, JobState.FINISHED)
    await assert_booked(edges, job, 10)
    assert reader.compute_s == pytest.approx(10 * TOKEN_S), "what its client is told is what it pays"


async def test_edge_and_worker_die_and_it_is_computed_on(edges: Pair) -> None:
    """Compute of both attempts."""
    edges.cluster.answers = [edges.cluster.accept(7, prefill="")]
    job, first = await begun(edges, bill=BILL, digests=False)
    await edges.first.kill()
    first.deaf = True
    resumed = Owner(edges.cluster, await edges.cluster.submitted(2))
    await resumed.listen()
    resumed.go_on(4, FinishReason.STOP)
    await state_is(edges, job, JobState.FINISHED)
    await assert_booked(edges, job, 7)


async def test_two_edges_want_it(edges: Pair) -> None:
    """The first only stood still: it finds that its lease is over, and says nothing of the end that it hears too."""
    over: list[int] = []
    job, owner = await begun(edges, bill=BILL, over=over.append)
    edges.first.bus.disconnect()
    await until(lambda: len(edges.second.detached) == 1 and len(edges.first.detached) == 0)
    assert over == [PROMPT + 3]
    edges.first.bus.reconnect()
    owner.go_on(2, FinishReason.STOP)
    await state_is(edges, job, JobState.FINISHED)
    await assert_booked(edges, job, 5)


async def test_nobody_adopts_it_before_it_expires(edges: Pair) -> None:
    """Whoever comes later finds it, ends it, and books what it used."""
    edges.second.detached.adopts = False
    job, owner = await begun(edges, bill=BILL)
    await edges.first.kill()
    owner.go_on(4)  # lost: no edge was there to hear it
    async with edges.second.database.write() as connection:
        await connection.execute(sa.update(detached_jobs).values(created=detached_jobs.c.created - TOTAL_S))
    assert ((await edges.row(job)).state, await ledger(edges.second.database)) == (JobState.RUNNING, [])
    owner.deaf = True
    edges.second.detached.adopts = True
    await state_is(edges, job, JobState.FAILED)
    with pytest.raises(DeadlineExceeded):
        await read_all(await attach(edges.second, job))
    await assert_booked(edges, job, 3)


async def test_it_is_cancelled(edges: Pair) -> None:
    job, _ = await begun(edges, bill=BILL)
    await edges.second.detached.cancel(job, TENANT)
    await state_is(edges, job, JobState.CANCELLED)
    await assert_booked(edges, job, 3)


async def test_it_is_deleted(edges: Pair) -> None:
    job, owner = await begun(edges, bill=BILL)
    owner.go_on(4)
    await until(lambda: edges.first.supervisor._jobs[job].tokens.received() == 7)
    await edges.first.detached.delete(job, TENANT)
    await until(lambda: owner.cancels)
    await assert_booked(edges, job, 7)


async def test_it_is_undone(edges: Pair) -> None:
    over: list[int] = []
    job, owner = await begun(edges, bill=BILL, over=over.append)
    await edges.first.detached.undo(job, TENANT)
    await until(lambda: owner.cancels)
    assert (await ledger(edges.second.database), over, len(edges.first.detached)) == ([], [], 0)


async def test_it_is_undone_while_its_row_cannot_be_deleted(edges: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops all the same; its row says so later."""

    async def away(*_: object, **__: object) -> bool:
        raise StoreUnavailable("The database cannot be used now.")

    job, owner = await begun(edges, bill=BILL)
    monkeypatch.setattr(edges.first.detached._store, "delete", away)
    await edges.first.detached.undo(job, TENANT)
    await until(lambda: owner.cancels)
    await state_is(edges, job, JobState.CANCELLED)


async def test_the_bill_of_one_that_says_nothing_is_its_tenants(edges: Pair) -> None:
    job, owner = await begun(edges)
    owner.go_on(1, FinishReason.STOP)
    await state_is(edges, job, JobState.FINISHED)
    (row,) = await ledger(edges.second.database)
    assert (row["tenant"], row["key"], row["completion_tokens"], row["cost"]) == (TENANT, "", 4, None)
