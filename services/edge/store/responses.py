"""Responses as rows, each with its own input; what came before is found along `previous`.

Owns the SQL. Invariants: a response is its tenant's alone; it ends once, and its conversation gets its items in the same
transaction; of those that were in time, the first end counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.errors import PayloadTooLarge
from services.edge.store.conversations import append
from services.edge.store.database import Database, database_time, has_name
from services.edge.store.records import JobState
from services.edge.store.tables import detached_jobs as jobs
from services.edge.store.tables import responses

Json = dict[str, Any]
PREFIX = "resp_"
"""Of a response's id; the rest is its job's."""
LONGEST = 1000
"""Responses that one history may hold."""
MOST_BYTES = 32 * 2**20
"""Of a history that goes on: each response of it reads all, on the event loop, and not all that it reads are tokens."""
_MOST_SWEPT = 1000
_encode, _decode = msgspec.json.encode, msgspec.json.decode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`object`: as clients see it. `input`: its own items."""

    object: Json
    input: list[Json]
    running: bool = False

    @property
    def id(self) -> str:
        return str(self.object["id"])


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of a history. `items`: its input, then its output."""

    id: str
    items: list[Json]
    running: bool = False


class SqlResponseStore:
    """Every method raises `StoreUnavailable`. What is not the tenant's is not there."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, tenant: str, response: StoredResponse, *, keep: bool = True) -> None:
        """A new row. One that has ended gives its items to its conversation, also when it is not to be kept itself."""
        row = {
            "id": response.id,
            "tenant": tenant,
            "running": response.running,
            "previous": response.object["previous_response_id"],
            "created": database_time(),
            "input": _encode(response.input),
            **_written(response.object),
        }
        async with self._database.write() as connection:
            if keep:
                await connection.execute(sa.insert(responses).values(row))
            if not response.running:
                await _tell_conversation(connection, tenant, response)

    async def end(self, tenant: str, ended: Json) -> Json | None:
        """How it ended: as `ended` says, unless it had ended already. None: it was deleted."""
        mine = _is(ended["id"], tenant)
        change = sa.update(responses).where(mine, responses.c.running).values(running=False, **_written(ended))
        async with self._database.write() as connection:
            changed = (await connection.execute(change)).rowcount
            row = (await connection.execute(sa.select(responses).where(mine))).mappings().one_or_none()
            if row is not None and changed:
                await _tell_conversation(connection, tenant, _stored(row))
        return None if row is None else _stored(row).object

    async def get(self, name: str, tenant: str) -> StoredResponse | None:
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(responses).where(_is(name, tenant)))).mappings().one_or_none()
        return None if row is None else _stored(row)

    async def delete(self, name: str, tenant: str) -> bool:
        async with self._database.write() as connection:
            return bool((await connection.execute(sa.delete(responses).where(_is(name, tenant)))).rowcount)

    async def history(self, name: str, tenant: str) -> tuple[list[Turn], str | None]:
        """The response and those before it, oldest first, and the id of what would come next: None = it is whole.

        Items only: what else their clients stored may be large. Raises `PayloadTooLarge` for more than may be read.
        """
        size = sa.func.length(responses.c.input) + sa.func.length(responses.c.output)
        newest = sa.select(responses.c.id, responses.c.previous, sa.literal(0).label("age"), size.label("size"))
        chain = newest.where(_is(name, tenant)).cte("chain", recursive=True)
        older = sa.select(responses.c.id, responses.c.previous, chain.c.age + 1, chain.c.size + size).where(
            responses.c.id == chain.c.previous,
            responses.c.tenant == tenant,
            chain.c.age < LONGEST,
            chain.c.size < MOST_BYTES,
        )
        chain = chain.union_all(older)
        columns = (responses.c.id, responses.c.previous, responses.c.running, responses.c.input, responses.c.output)
        query = sa.select(*columns, chain.c.age, chain.c.size).join(chain, chain.c.id == responses.c.id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(chain.c.age.desc()))).all()
        if not rows:
            return [], name
        oldest = rows[0]
        if oldest.previous is not None and (oldest.age >= LONGEST or oldest.size >= MOST_BYTES):
            raise PayloadTooLarge("The history is too long: begin another one.", param="previous_response_id")
        return [Turn(row.id, [*_decode(row.input), *_decode(row.output)], bool(row.running)) for row in rows], oldest.previous

    async def left(self, most: int) -> list[tuple[str, str]]:
        """(id, tenant) of some whose job runs no more, oldest first: whoever read it did not see to its end."""
        job = sa.func.substr(responses.c.id, len(PREFIX) + 1)
        over = sa.or_(jobs.c.job.is_(None), jobs.c.state != JobState.RUNNING)
        query = sa.select(responses.c.id, responses.c.tenant).outerjoin(jobs, jobs.c.job == job).where(responses.c.running, over)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(responses.c.created).limit(most))).all()
        return [(row.id, row.tenant) for row in rows]

    async def sweep(self, keep_s: float) -> int:
        """Forget what is older; how many that were."""
        old = sa.select(responses.c.id).where(responses.c.created < database_time() - keep_s).limit(_MOST_SWEPT)
        async with self._database.write() as connection:
            return (await connection.execute(sa.delete(responses).where(responses.c.id.in_(old)))).rowcount


async def _tell_conversation(connection: AsyncConnection, tenant: str, response: StoredResponse) -> None:
    """A conversation that was deleted meanwhile gets nothing."""
    conversation = response.object["conversation"]
    said: Sequence[Json] = response.object["output"]
    if conversation is not None and response.object["status"] in ("completed", "incomplete"):
        await append(connection, conversation["id"], tenant, [*response.input, *said])


def _is(name: str, tenant: str) -> sa.ColumnElement[bool]:
    return sa.and_(has_name(responses.c.id, name), responses.c.tenant == tenant)


def _written(response: Json) -> dict[str, bytes]:
    about = {name: value for name, value in response.items() if name != "output"}
    return {"object": _encode(about), "output": _encode(response["output"])}


def _stored(row: sa.RowMapping) -> StoredResponse:
    response = {**_decode(row["object"]), "output": _decode(row["output"])}
    return StoredResponse(response, _decode(row["input"]), bool(row["running"]))
