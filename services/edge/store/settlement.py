"""What a detached job used, from its row into the ledger and its budgets, in the transaction that ends or deletes the row.

Owns nothing. Invariant: so a job is booked once, whichever edge ends it, and a row that has ended is in the ledger: no edge that
dies between the two can lose an entry or bring it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from services.edge.gate.records import Bill, Entry
from services.edge.store.records import JobState
from services.edge.store.tables import budgets
from services.edge.store.tables import detached_jobs as jobs
from services.edge.store.tables import detached_tokens as tokens
from services.edge.store.usage import book


async def settle(connection: AsyncConnection, ended: Sequence[str]) -> list[Entry]:
    """Book these jobs with the tokens that are in their rows; what was booked now, and not before.

    One that nobody began used nothing, nor did one that failed before its first token, or has no bill.
    """
    if not ended:
        return []
    bills: dict[str, Bill] = {}
    entries: list[Entry] = []
    for row in await _rows(connection, ended):
        if row.completion_tokens or (row.owned and row.state != JobState.FAILED):
            bill = bills[row.job] = msgspec.json.decode(row.bill, type=Bill)
            used = bill.used(row.job, row.completion_tokens, row.cached_tokens or 0, row.compute_s)
            entries.append(Entry(row.tenant, bill.key, used))
    new = await book(connection, entries)
    booked = [entry for entry in entries if entry.used.job in new]
    await _charge(connection, booked, bills)
    return booked


async def _rows(connection: AsyncConnection, ended: Sequence[str]) -> Sequence[Any]:
    count = sa.select(sa.func.coalesce(sa.func.sum(tokens.c.count), 0)).where(tokens.c.job == jobs.c.job).scalar_subquery()
    columns = (jobs.c.job, jobs.c.tenant, jobs.c.state, jobs.c.owned, jobs.c.bill, jobs.c.cached_tokens, jobs.c.compute_s)
    query = sa.select(*columns, count.label("completion_tokens")).where(jobs.c.job.in_(ended), jobs.c.bill.is_not(None))
    return (await connection.execute(query)).all()


async def _charge(connection: AsyncConnection, booked: Sequence[Entry], bills: dict[str, Bill]) -> None:
    """In one order, so that two edges never wait for each other in a circle. A window that is forgotten is over."""
    charges: Counter[tuple[str, str]] = Counter()
    for entry in booked:
        for budget in bills[entry.used.job].budgets:
            charges[budget] += entry.used.tokens
    for (owner, window), used in sorted(charges.items()):
        mine = (budgets.c.owner == owner, budgets.c.window == window)
        spent = {"spent": budgets.c.spent + used, "taken": budgets.c.taken + used}
        await connection.execute(sa.update(budgets).where(*mine).values(spent))
