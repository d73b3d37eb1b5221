"""Conversations and their items as rows.

Owns the SQL. Invariants: a conversation is its tenant's alone; an id names one item of it, and items keep the order in which they
were appended, whoever appends at the same time; what one request reads of a conversation is bounded, because what it may grow to
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.errors import PayloadTooLarge
from services.edge.store.database import Database, database_time, has_name
from services.edge.store.tables import conversation_items as items
from services.edge.store.tables import conversations

Json = dict[str, Any]
MOST_BYTES = 8 * 2**20
MOST_ITEMS = 10_000
"""A conversation that has so much takes no more: each response of it reads all, on the event loop."""
_encode, _decode = msgspec.json.encode, msgspec.json.decode


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """`created`: Unix seconds by the database's clock."""

    id: str
    created: float
    metadata: dict[str, str]


class SqlConversationStore:
    """Every method raises `StoreUnavailable`. What is not the tenant's is not there."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, tenant: str, metadata: dict[str, str], first: Sequence[Json]) -> StoredConversation:
        row = {"id": name, "tenant": tenant, "created": database_time(), "metadata": _encode(metadata)}
        async with self._database.write() as connection:
            made = await connection.execute(sa.insert(conversations).values(row).returning(conversations))
            conversation = _conversation(made.mappings().one())
            await append(connection, name, tenant, first)
        return conversation

    async def get(self, name: str, tenant: str) -> StoredConversation | None:
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(conversations).where(_is(name, tenant)))).mappings().one_or_none()
        return None if row is None else _conversation(row)

    async def update(self, name: str, tenant: str, metadata: dict[str, str]) -> StoredConversation | None:
        change = sa.update(conversations).where(_is(name, tenant)).values(metadata=_encode(metadata)).returning(conversations)
        async with self._database.write() as connection:
            row = (await connection.execute(change)).mappings().one_or_none()
        return None if row is None else _conversation(row)

    async def delete(self, name: str, tenant: str) -> bool:
        async with self._database.write() as connection:
            deleted = await connection.execute(sa.delete(conversations).where(_is(name, tenant)))
            if deleted.rowcount:
                await connection.execute(sa.delete(items).where(items.c.conversation == name))
            return bool(deleted.rowcount)

    async def items(self, name: str, tenant: str) -> list[Json] | None:
        """All, oldest first. None: there is no such conversation."""
        async with self._database.read() as connection:
            if (await connection.execute(sa.select(conversations.c.id).where(_is(name, tenant)))).one_or_none() is None:
                return None
            query = sa.select(items.c.item).where(items.c.conversation == name).order_by(items.c.position)
            return [_decode(item) for item in (await connection.scalars(query)).all()]

    async def append(self, name: str, tenant: str, new: Sequence[Json]) -> frozenset[str] | None:
        """The ids of `new` that name items of it already; if there are any, nothing is added. None: there is no conversation.

        Raises `PayloadTooLarge` when it is full.
        """
        async with self._database.write() as connection:
            if not await _lock(connection, name, tenant):
                return None
            known = await _known(connection, name, new)
            if not known and not await _add(connection, name, new):
                raise PayloadTooLarge("The conversation is full: begin another one.", param="items")
            return known

    async def delete_item(self, name: str, tenant: str, item: str) -> bool:
        """False: there is no such item."""
        async with self._database.write() as connection:
            if not await _lock(connection, name, tenant):
                return False
            mine = (items.c.conversation == name, has_name(items.c.id, item))
            deleted = await connection.execute(sa.delete(items).where(*mine))
            return bool(deleted.rowcount)


async def append(connection: AsyncConnection, name: str, tenant: str, new: Sequence[Json]) -> None:
    """As part of a transaction. Those whose ids name items of it already are left out: they were added meanwhile. One that is
    gone or full takes nothing."""
    if await _lock(connection, name, tenant):
        known = await _known(connection, name, new)
        await _add(connection, name, [item for item in new if item["id"] not in known])


async def _known(connection: AsyncConnection, name: str, new: Sequence[Json]) -> frozenset[str]:
    """The ids of `new` that name items already of a conversation that is locked."""
    query = sa.select(items.c.id).where(items.c.conversation == name, items.c.id.in_([item["id"] for item in new]))
    return frozenset((await connection.scalars(query)).all())


async def _add(connection: AsyncConnection, name: str, new: Sequence[Json]) -> bool:
    """To a conversation that is locked. False: it is full."""
    has = sa.select(
        sa.func.coalesce(sa.func.max(items.c.position), -1), sa.func.count(), sa.func.sum(sa.func.length(items.c.item))
    ).where(items.c.conversation == name)
    last, count, size = (await connection.execute(has)).one()
    if count >= MOST_ITEMS or (size or 0) >= MOST_BYTES:
        return False
    first = int(last) + 1
    rows = [
        {"conversation": name, "position": first + at, "id": item["id"], "item": _encode(item)} for at, item in enumerate(new)
    ]
    if rows:
        await connection.execute(sa.insert(items), rows)
    return True


async def _lock(connection: AsyncConnection, name: str, tenant: str) -> bool:
    """Others that write to this conversation wait until our transaction ends; in SQLite they do anyway."""
    query = sa.select(conversations.c.id).where(_is(name, tenant)).with_for_update()
    return (await connection.execute(query)).one_or_none() is not None


def _is(name: str, tenant: str) -> sa.ColumnElement[bool]:
    return sa.and_(has_name(conversations.c.id, name), conversations.c.tenant == tenant)


def _conversation(row: sa.RowMapping) -> StoredConversation:
    return StoredConversation(row["id"], float(row["created"]), _decode(row["metadata"]))
