"""What NATS accounts may do, as rows. Owns the SQL."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from schemas.job import Tier
from services.edge.gate.records import AccountRecord, Unreadable
from services.edge.store.cells import limits_of, limits_text, models_of, models_text, readable
from services.edge.store.database import Database
from services.edge.store.tables import nats_accounts as accounts


class SqlAccountStore:
    """Every method raises `StoreUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, AccountRecord | Unreadable]:
        """By name, in its order."""
        async with self._database.read() as connection:
            rows = (await connection.execute(sa.select(accounts).order_by(accounts.c.name))).mappings()
            return {row["name"]: readable(_record, row, row["name"], 0.0) for row in rows}

    async def set(self, record: AccountRecord) -> None:
        """In place of what the account had."""
        row = {
            "name": record.name,
            "tier": record.tier,
            "models": models_text(record.models),
            "limits": limits_text(record.limits),
        }
        async with self._database.write() as connection:
            await connection.execute(sa.delete(accounts).where(accounts.c.name == record.name))
            await connection.execute(sa.insert(accounts).values(row))

    async def delete(self, name: str) -> bool:
        """False: there is nothing of that name."""
        async with self._database.write() as connection:
            gone = await connection.execute(sa.delete(accounts).where(accounts.c.name == name))
            return gone.rowcount > 0


def _record(row: Any) -> AccountRecord:
    return AccountRecord(row["name"], Tier(row["tier"]), models_of(row["models"]), limits_of(row["limits"]))
