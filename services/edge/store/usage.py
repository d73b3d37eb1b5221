"""The usage ledger and budgets as rows. Owns the SQL, and the one transaction in which an edge books and is allotted.

Invariants: an entry is booked once, whoever brings it how often; what is spent and what edges hold together pass a budget only by
what running requests had been promised before their edge's lease ended, or the budget was made smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from services.edge.gate import windows
from services.edge.gate.purse import Ask, Got
from services.edge.gate.records import Entry
from services.edge.store.database import Database, database_time, insert_new
from services.edge.store.tables import allotments, budgets, usage

_HELD_S = 2 * 86_400.0
"""Longer than any request that began in a window goes on after its end."""
_MOST_SWEPT = 1000


class SqlUsageStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def sweep(self, keep_s: float) -> bool:
        """Forget what is older, and what edges that died held of budgets whose time is over. True: there is more to forget.

        What is held of a budget that still counts stays until somebody asks for it: only then is it given back.
        """
        async with self._database.write() as connection:
            now = float((await connection.execute(sa.select(database_time()))).scalar_one())
            await connection.execute(sa.delete(allotments).where(_ended(allotments, now - _HELD_S)))
            await connection.execute(sa.delete(budgets).where(_ended(budgets, now - keep_s)))
            old = sa.select(usage.c.job).where(usage.c.booked < now - keep_s).limit(_MOST_SWEPT)
            return (await connection.execute(sa.delete(usage).where(usage.c.job.in_(old)))).rowcount == _MOST_SWEPT

    async def exchange(
        self, edge: str, entries: Sequence[Entry], asks: Sequence[Ask], lease_s: float
    ) -> Mapping[tuple[str, str], Got]:
        """See `gate.budgets.UsageStore`. What an edge keeps is set, not added to, so a repetition changes nothing."""
        async with self._database.write() as connection:
            booked = await book(connection, entries)
            ordered = sorted(asks, key=lambda ask: (ask.owner, ask.window))  # two edges never wait for each other in a circle
            return {(ask.owner, ask.window): await _allot(connection, edge, ask, booked, lease_s) for ask in ordered}


def _ended(table: sa.Table, before: float) -> sa.ColumnElement[bool]:
    """Rows of windows that were over at `before`."""
    window = table.c.window
    return sa.or_(*(sa.and_(window.like(f"{kind}-%"), window < windows.name(kind, before)) for kind in windows.ENDING))


async def book(connection: AsyncConnection, entries: Sequence[Entry]) -> set[str]:
    """The jobs that were not booked before."""
    if not entries:
        return set()
    rows = [
        {
            "job": entry.used.job,
            "tenant": entry.tenant,
            "key": entry.key,
            "model": entry.used.model,
            "prompt_tokens": entry.used.prompt_tokens,
            "cached_tokens": entry.used.cached_tokens,
            "completion_tokens": entry.used.completion_tokens,
            "compute_s": entry.used.compute_s,
            "cost": entry.used.cost,
        }
        for entry in sorted(entries, key=lambda entry: entry.used.job)
    ]
    insert = insert_new(connection, usage).values(booked=database_time()).returning(usage.c.job)
    return set((await connection.scalars(insert, rows)).all())


async def _allot(connection: AsyncConnection, edge: str, ask: Ask, booked: set[str], lease_s: float) -> Got:
    budget = sa.and_(budgets.c.owner == ask.owner, budgets.c.window == ask.window)
    held = sa.and_(allotments.c.owner == ask.owner, allotments.c.window == ask.window)
    name = {"owner": ask.owner, "window": ask.window}
    await connection.execute(insert_new(connection, budgets), {**name, "spent": 0, "taken": 0})
    # From here on the row is ours alone, until the end of the transaction.
    row = (await connection.execute(sa.select(budgets.c.spent, budgets.c.taken).where(budget).with_for_update())).one()
    ended = sa.or_(allotments.c.edge == edge, allotments.c.lease_until < database_time())
    returned = (await connection.scalars(sa.delete(allotments).where(held, ended).returning(allotments.c.amount))).all()
    newly = sum(tokens for job, tokens in ask.charges.items() if job in booked)
    taken = row.taken - sum(returned) + newly + ask.keep
    granted = max(0, min(ask.want, ask.limit - taken))
    amount = ask.keep + granted
    if amount:
        lease = {"edge": edge, "amount": amount, "lease_until": database_time() + lease_s}
        await connection.execute(sa.insert(allotments).values({**name, **lease}))
    spent = row.spent + newly
    await connection.execute(sa.update(budgets).where(budget).values(spent=spent, taken=taken + granted))
    return Got(granted, spent)
