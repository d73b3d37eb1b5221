"""Detached jobs as rows: who holds each of them, what it has said so far, how it ended.

Owns the SQL. Invariants: at any time one edge at most holds a job, and only it writes to it; a job is taken only when its lease
ran out by the database's clock, or from an edge that is known to be dead; a job ends once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.codec import decode
from services.edge.gate.records import Bill
from services.edge.store.checkpoints import Encoded, facts_row, write
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
    StoredJob,
    Swept,
    Written,
)
from services.edge.store.settlement import settle
from services.edge.store.tables import detached_jobs as jobs
from services.edge.store.tables import detached_tokens as tokens

ATTEMPTS = 1000
"""What an adoption claims: more than an edge can make between two checkpoints, so that no attempt is made twice."""
_MOST_SWEPT = 1000
_ENDED = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class JobStore(Protocol):
    """Every method raises `StoreUnavailable` within a few seconds when the database cannot be used."""

    async def create(self, job: str, tenant: str, request: bytes, edge: str, lease_s: float, bill: Bill | None = None) -> None:
        """A new row, held by `edge`. Without a `bill` what it uses is not booked."""
        ...

    async def checkpoint(self, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> Written:
        """Write what is new, renew the leases, book what has ended, all at once. What `edge` does not hold is not written.

        Safe to repeat.
        """
        ...

    async def adopt(self, edge: str, dead: Collection[str], lease_s: float, most: int) -> list[StoredJob]:
        """Take up to `most` running jobs whose lease ran out, or whose edge is `dead`. With all their tokens."""
        ...

    async def get(self, job: str, tenant: str) -> StoredJob | None:
        """Without its tokens."""
        ...

    async def read(self, job: str, positions: Positions) -> Progress | None: ...

    async def ask_cancel(self, job: str, tenant: str | None) -> bool:
        """Its holder will hear of it, or who adopts it next. `tenant` None: anybody's. False: there is no such running job."""
        ...

    async def delete(self, job: str, tenant: str, *, booked: bool = True) -> bool:
        """With all its tokens; first what it used so far is booked, unless it counts as if it had never been."""
        ...

    async def sweep(self, retention: Retention) -> Swept:
        """Let go of what ended long ago, and of more when it takes too much room."""
        ...


class SqlJobStore:
    """A `JobStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, job: str, tenant: str, request: bytes, edge: str, lease_s: float, bill: Bill | None = None) -> None:
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
            "bill": msgspec.json.encode(bill) if bill is not None else None,
            **facts_row(Facts()),
        }
        async with self._database.write() as connection:
            await connection.execute(sa.insert(jobs).values(row))

    async def checkpoint(self, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> Written:
        encoded = [Encoded.of(one) for one in checkpoints]
        async with self._database.write() as connection:
            return await write(connection, edge, encoded, lease_s)

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
        columns = (jobs.c.state, jobs.c.cached_tokens, jobs.c.compute_s, jobs.c.error_code, jobs.c.error)
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(*columns).where(jobs.c.job == job))).one_or_none()
            if row is None:
                return None
            chunks = await _chunks(connection, job, positions)
        return Progress(JobState(row.state), chunks, row.cached_tokens, row.compute_s, row.error_code, row.error)

    async def ask_cancel(self, job: str, tenant: str | None) -> bool:
        which = jobs.c.job == job if tenant is None else _is(job, tenant)
        return await self._one(sa.update(jobs).where(which, jobs.c.state == JobState.RUNNING).values(cancel=True))

    async def delete(self, job: str, tenant: str, *, booked: bool = True) -> bool:
        async with self._database.write() as connection:
            # Locked before anything is booked: its holder, who may end it now, locks in this order too.
            mine = (await connection.scalars(sa.select(jobs.c.job).where(_is(job, tenant)).with_for_update())).all()
            if booked:
                await settle(connection, mine)
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
                await settle(connection, old)  # ended by an edge of the version before, it is not booked yet
                await connection.execute(sa.delete(tokens).where(tokens.c.job.in_(old)))
                emptied = {"state": JobState.EXPIRED, "request": b"", "size": 0, "bill": None}
                await connection.execute(sa.update(jobs).where(jobs.c.job.in_(old)).values(emptied))
            return Swept(len(old), forgotten.rowcount)

    async def _one(self, statement: sa.Update) -> bool:
        async with self._database.write() as connection:
            return bool((await connection.execute(statement)).rowcount)


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


def _stored(row: sa.RowMapping, chunks: tuple[Chunk, ...] = ()) -> StoredJob:
    facts = Facts(**{name: row[name] for name in Facts.__slots__})
    named = {name: row[name] for name in ("job", "request", "edge")}
    return StoredJob(state=JobState(row["state"]), age=float(row["age"]), facts=facts, chunks=chunks, **named)
