"""Detached jobs as rows: who holds each of them, what it has said so far, how it ended.

Owns the SQL. Invariants: at any time one edge at most holds a job, and only it writes to it; a job is taken only when its lease
ran out by the database's clock, or from an edge that is known to be dead; a job ends once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.codec import decode, encode
from services.edge.store.database import Database, database_time
from services.edge.store.records import (
    ROWS,
    Checkpoint,
    Chunk,
    Data,
    Facts,
    JobState,
    Positions,
    Progress,
    Retention,
    Standing,
    StoredJob,
    Swept,
)
from services.edge.store.tables import detached_jobs as jobs
from services.edge.store.tables import detached_tokens as tokens

ATTEMPTS = 1000
"""What an adoption claims: more than an edge can make between two checkpoints, so that no attempt is made twice."""
_MOST_SWEPT = 1000
_ENDED = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class JobStore(Protocol):
    """Every method raises `StoreUnavailable` within a few seconds when the database cannot be used."""

    async def create(self, job: str, tenant: str, request: bytes, edge: str, lease_s: float) -> None:
        """A new row, held by `edge`."""
        ...

    async def checkpoint(self, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> dict[str, Standing]:
        """Write what is new, and renew the leases, all at once. What `edge` does not hold is not written. Safe to repeat."""
        ...

    async def adopt(self, edge: str, dead: Collection[str], lease_s: float, most: int) -> list[StoredJob]:
        """Take up to `most` running jobs whose lease ran out, or whose edge is `dead`. With all their tokens."""
        ...

    async def get(self, job: str, tenant: str) -> StoredJob | None:
        """Without its tokens."""
        ...

    async def read(self, job: str, positions: Positions) -> Progress | None: ...

    async def ask_cancel(self, job: str, tenant: str) -> bool:
        """Its holder will hear of it. False: there is no such running job."""
        ...

    async def delete(self, job: str, tenant: str) -> bool: ...

    async def sweep(self, retention: Retention) -> Swept:
        """Let go of what ended long ago, and of more when it takes too much room."""
        ...


class SqlJobStore:
    """A `JobStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, job: str, tenant: str, request: bytes, edge: str, lease_s: float) -> None:
        now = database_time()
        row: dict[str, Any] = {
            "job": job,
            "tenant": tenant,
            "state": JobState.RUNNING,
            "request": request,
            "created": now,
            "edge": edge,
            "lease_until": now + lease_s,
            "cancel": False,
            "error_code": "",
            "error": "",
            "size": 0,
            **_facts_row(Facts()),
        }
        async with self._database.write() as connection:
            await connection.execute(sa.insert(jobs).values(row))

    async def checkpoint(self, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> dict[str, Standing]:
        async with self._database.write() as connection:
            await _renew(connection, edge, checkpoints, lease_s)
            standings = await _standings(connection, edge, [one.job for one in checkpoints])
            held = [one for one in checkpoints if standings[one.job] in (Standing.HELD, Standing.CANCEL)]
            await _append(connection, held)
            return standings

    async def adopt(self, edge: str, dead: Collection[str], lease_s: float, most: int) -> list[StoredJob]:
        lapsed = sa.and_(
            jobs.c.state == JobState.RUNNING, sa.or_(jobs.c.lease_until < database_time(), jobs.c.edge.in_(sorted(dead)))
        )
        async with self._database.read() as connection:
            query = sa.select(jobs.c.job).where(lapsed).order_by(jobs.c.lease_until).limit(most)
            wanted = list((await connection.scalars(query)).all())
        if not wanted:
            return []
        async with self._database.write() as connection:
            # Another edge may have been quicker: the condition is looked at again, under the row's lock.
            taken = (
                sa.update(jobs)
                .where(jobs.c.job.in_(wanted), lapsed)
                .values(edge=edge, lease_until=database_time() + lease_s, claimed=jobs.c.claimed + ATTEMPTS)
                .returning(jobs, (database_time() - jobs.c.created).label("age"))
            )
            rows = (await connection.execute(taken)).mappings().all()
            return [_stored(row, await _chunks(connection, row["job"])) for row in rows]

    async def get(self, job: str, tenant: str) -> StoredJob | None:
        query = sa.select(jobs, (database_time() - jobs.c.created).label("age")).where(_is(job, tenant))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return _stored(row) if row is not None else None

    async def read(self, job: str, positions: Positions) -> Progress | None:
        columns = (jobs.c.state, jobs.c.cached_tokens, jobs.c.error_code, jobs.c.error)
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(*columns).where(jobs.c.job == job))).one_or_none()
            if row is None:
                return None
            chunks = await _chunks(connection, job, positions)
        return Progress(JobState(row.state), chunks, row.cached_tokens, row.error_code, row.error)

    async def ask_cancel(self, job: str, tenant: str) -> bool:
        return await self._one(sa.update(jobs).where(_is(job, tenant), jobs.c.state == JobState.RUNNING).values(cancel=True))

    async def delete(self, job: str, tenant: str) -> bool:
        async with self._database.write() as connection:
            deleted = await connection.execute(sa.delete(jobs).where(_is(job, tenant)))
            if deleted.rowcount:
                await connection.execute(sa.delete(tokens).where(tokens.c.job == job))
            return bool(deleted.rowcount)

    async def sweep(self, retention: Retention) -> Swept:
        async with self._database.read() as connection:
            now = float((await connection.execute(sa.select(database_time()))).scalar_one())
            ended = sa.select(jobs.c.job, jobs.c.ended, jobs.c.size).where(jobs.c.state.in_(_ENDED)).order_by(jobs.c.ended.desc())
            rows = (await connection.execute(ended)).all()
        room = accumulate(row.size for row in rows)
        old = [
            row.job
            for row, taken in zip(rows, room, strict=True)
            if row.ended < now - retention.keep_s or taken > retention.keep_bytes
        ][-_MOST_SWEPT:]
        async with self._database.write() as connection:
            forgotten = await connection.execute(
                sa.delete(jobs).where(jobs.c.state == JobState.EXPIRED, jobs.c.ended < now - retention.remember_s)
            )
            if old:
                await connection.execute(sa.delete(tokens).where(tokens.c.job.in_(old)))
                emptied = {"state": JobState.EXPIRED, "request": b"", "size": 0}
                await connection.execute(sa.update(jobs).where(jobs.c.job.in_(old)).values(emptied))
            return Swept(len(old), forgotten.rowcount)

    async def _one(self, statement: sa.Update) -> bool:
        async with self._database.write() as connection:
            return bool((await connection.execute(statement)).rowcount)


async def _renew(connection: AsyncConnection, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> None:
    now = database_time()
    renew = (
        sa.update(jobs)
        .where(jobs.c.job == sa.bindparam("of_job"), jobs.c.edge == edge)
        .values(
            lease_until=now + sa.bindparam("lease"),
            size=jobs.c.size + sa.bindparam("added"),
            **{name: sa.bindparam(f"new_{name}") for name in _facts_row(Facts())},
        )
    )
    rows = [
        {
            "of_job": one.job,
            "lease": -1.0 if one.release else lease_s,
            "added": sum(len(encode(chunk.data)) for chunk in one.chunks),
            **{f"new_{name}": value for name, value in _facts_row(one.facts).items()},
        }
        for one in checkpoints
    ]
    await connection.execute(renew, rows)
    for one in checkpoints:
        if one.end is not None:
            ended = {"state": one.end.state, "error_code": one.end.code, "error": one.end.message, "ended": now}
            mine = (jobs.c.job == one.job, jobs.c.edge == edge, jobs.c.state == JobState.RUNNING)
            await connection.execute(sa.update(jobs).where(*mine).values(ended))


async def _standings(connection: AsyncConnection, edge: str, asked: Sequence[str]) -> dict[str, Standing]:
    query = sa.select(jobs.c.job, jobs.c.edge, jobs.c.cancel).where(jobs.c.job.in_(asked))
    found = dict.fromkeys(asked, Standing.DELETED)
    for row in (await connection.execute(query)).all():
        held = Standing.CANCEL if row.cancel else Standing.HELD
        found[row.job] = held if row.edge == edge else Standing.TAKEN
    return found


async def _append(connection: AsyncConnection, checkpoints: Sequence[Checkpoint]) -> None:
    """A checkpoint whose fate was unknown is written again, longer: what it left is replaced."""
    rows = [
        {
            "of_job": one.job,
            "of_choice": chunk.choice,
            "from_first": chunk.first,
            "count": chunk.count,
            "data": encode(chunk.data),
        }
        for one in checkpoints
        for chunk in one.chunks
    ]
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


async def _chunks(connection: AsyncConnection, job: str, positions: Positions | None = None) -> tuple[Chunk, ...]:
    """In order. `positions`: only those that reach there; None: all."""
    query = sa.select(tokens).where(tokens.c.job == job).order_by(tokens.c.choice, tokens.c.first)
    if positions is not None:
        reached = tokens.c.first + tokens.c.count
        beyond = [sa.and_(tokens.c.choice == choice, reached >= index) for choice, index in positions.items()]
        query = query.where(sa.or_(sa.false(), *beyond))
    rows = (await connection.execute(query)).all()
    return tuple(Chunk(row.choice, row.first, decode(row.data, Data, ROWS)) for row in rows)


def _is(job: str, tenant: str) -> sa.ColumnElement[bool]:
    return sa.and_(jobs.c.job == job, jobs.c.tenant == tenant)


def _facts_row(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in Facts.__slots__}


def _stored(row: sa.RowMapping, chunks: tuple[Chunk, ...] = ()) -> StoredJob:
    facts = Facts(**{name: row[name] for name in Facts.__slots__})
    names = ("job", "tenant", "request", "edge", "cancel", "error_code", "error")
    return StoredJob(
        state=JobState(row["state"]), age=float(row["age"]), facts=facts, chunks=chunks, **{name: row[name] for name in names}
    )
