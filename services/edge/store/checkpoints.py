"""A checkpoint as SQL: leases renewed, tokens added, what ended booked, in the caller's transaction.

Invariant: nothing is written of a job that another edge holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.codec import encode
from services.edge.store.database import database_time
from services.edge.store.records import Checkpoint, Chunk, Facts, JobState, Standing, Written
from services.edge.store.settlement import settle
from services.edge.store.tables import detached_jobs as jobs
from services.edge.store.tables import detached_tokens as tokens


@dataclass(frozen=True, slots=True)
class Encoded:
    """A checkpoint with its chunks as rows: made before the transaction, which others wait for."""

    checkpoint: Checkpoint
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Encoded:
        return cls(checkpoint, [_row(checkpoint.job, chunk) for chunk in checkpoint.chunks])


async def write(connection: AsyncConnection, edge: str, encoded: Sequence[Encoded], lease_s: float) -> Written:
    """See `jobs.JobStore.checkpoint`."""
    await _renew(connection, edge, encoded, lease_s)
    standings = await _standings(connection, edge, [one.checkpoint.job for one in encoded])
    held = [one for one in encoded if standings[one.checkpoint.job] in (Standing.HELD, Standing.CANCEL)]
    await _append(connection, [row for one in held for row in one.rows])
    ended = [one.checkpoint.job for one in held if one.checkpoint.end is not None]
    await _weigh(connection, ended)
    return Written(standings, await settle(connection, ended))


def facts_row(facts: Facts) -> dict[str, Any]:
    """By column."""
    return {name: getattr(facts, name) for name in Facts.__slots__}


async def _renew(connection: AsyncConnection, edge: str, encoded: Sequence[Encoded], lease_s: float) -> None:
    now = database_time()
    renew = (
        sa.update(jobs)
        .where(jobs.c.job == sa.bindparam("of_job"), jobs.c.edge == edge)
        .values(
            lease_until=now + sa.bindparam("lease"),
            **{name: sa.bindparam(f"new_{name}") for name in facts_row(Facts())},
        )
    )
    rows = [
        {
            "of_job": one.checkpoint.job,
            "lease": -1.0 if one.checkpoint.release else lease_s,
            **{f"new_{name}": value for name, value in facts_row(one.checkpoint.facts).items()},
        }
        for one in encoded
    ]
    await connection.execute(renew, rows)
    for job, end in [(one.checkpoint.job, one.checkpoint.end) for one in encoded]:
        if end is not None:
            ended = {"state": end.state, "error_code": end.code, "error": end.message, "ended": now}
            mine = (jobs.c.job == job, jobs.c.edge == edge, jobs.c.state == JobState.RUNNING)
            await connection.execute(sa.update(jobs).where(*mine).values(ended))


async def _standings(connection: AsyncConnection, edge: str, asked: Sequence[str]) -> dict[str, Standing]:
    query = sa.select(jobs.c.job, jobs.c.edge, jobs.c.cancel).where(jobs.c.job.in_(asked))
    found = dict.fromkeys(asked, Standing.DELETED)
    for row in (await connection.execute(query)).all():
        held = Standing.CANCEL if row.cancel else Standing.HELD
        found[row.job] = held if row.edge == edge else Standing.TAKEN
    return found


async def _append(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """A checkpoint whose fate was unknown is written again, longer: what it left is replaced."""
    if not rows:
        return
    job: sa.BindParameter[str] = sa.bindparam("of_job")
    choice: sa.BindParameter[int] = sa.bindparam("of_choice")
    first: sa.BindParameter[int] = sa.bindparam("from_first")
    await connection.execute(
        sa.delete(tokens).where(tokens.c.job == job, tokens.c.choice == choice, tokens.c.first >= first),
        [{name: row[name] for name in ("of_job", "of_choice", "from_first")} for row in rows],
    )
    await connection.execute(sa.insert(tokens).values(job=job, choice=choice, first=first), rows)


async def _weigh(connection: AsyncConnection, ended: Sequence[str]) -> None:
    """How much room what ended takes from now on. Found, not added up: a checkpoint may come twice."""
    if ended:
        bytes_ = sa.func.coalesce(sa.func.sum(sa.func.length(tokens.c.data)), 0)
        size = sa.select(bytes_).where(tokens.c.job == jobs.c.job).scalar_subquery()
        await connection.execute(sa.update(jobs).where(jobs.c.job.in_(ended)).values(size=size))


def _row(job: str, chunk: Chunk) -> dict[str, Any]:
    return {
        "of_job": job,
        "of_choice": chunk.choice,
        "from_first": chunk.first,
        "count": chunk.count,
        "data": encode(chunk.data),
    }
