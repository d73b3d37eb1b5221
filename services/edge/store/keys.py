"""API keys as rows. Owns the SQL; knows digests only, never a key's text."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from services.edge.store.database import Database, database_time
from services.edge.store.tables import api_keys as keys

from schemas.job import Tier
from services.edge.gate.records import KeyRecord


class SqlKeyStore:
    """Every method raises `StoreUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        key: str,
        digest: bytes,
        tenant: str,
        *,
        name: str = "",
        tier: Tier = Tier.PAID,
        models: frozenset[str] | None = None,
        valid_s: float | None = None,
    ) -> KeyRecord:
        """A new row. `valid_s`: it expires after so many seconds."""
        now = database_time()
        row: dict[str, Any] = {
            "id": key,
            "digest": digest,
            "tenant": tenant,
            "name": name,
            "tier": tier,
            "models": None if models is None else json.dumps(sorted(models)),
            "created": now,
            "expires": None if valid_s is None else now + valid_s,
            "changed": now,
        }
        async with self._database.write() as connection:
            made = await connection.execute(sa.insert(keys).values(row).returning(keys))
            return _record(made.mappings().one())

    async def get(self, key: str) -> KeyRecord | None:
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(keys).where(keys.c.id == key))).mappings().one_or_none()
        return None if row is None else _record(row)

    async def changed_since(self, when: float) -> list[KeyRecord]:
        return await self._select(sa.select(keys).where(keys.c.changed >= when).order_by(keys.c.changed))

    async def all(self, tenant: str | None = None) -> list[KeyRecord]:
        """Oldest first; of one tenant, or all."""
        query = sa.select(keys).order_by(keys.c.created, keys.c.id)
        return await self._select(query if tenant is None else query.where(keys.c.tenant == tenant))

    async def end(self, key: str, after_s: float = 0.0) -> KeyRecord | None:
        """The key ends, now or after so many seconds; one that ended before stays as it is. None: there is no such key."""
        now = database_time()
        change = {"revoked": now} if after_s == 0.0 else {"expires": now + after_s}
        longer = sa.or_(keys.c.expires.is_(None), keys.c.expires > now + after_s)
        alive = sa.and_(keys.c.id == key, keys.c.revoked.is_(None), longer)
        async with self._database.write() as connection:
            await connection.execute(sa.update(keys).where(alive).values(**change, changed=now))
            row = (await connection.execute(sa.select(keys).where(keys.c.id == key))).mappings().one_or_none()
        return None if row is None else _record(row)

    async def _select(self, query: sa.Select[Any]) -> list[KeyRecord]:
        async with self._database.read() as connection:
            return [_record(row) for row in (await connection.execute(query)).mappings()]


def _record(row: Any) -> KeyRecord:
    return KeyRecord(
        id=row["id"],
        digest=row["digest"],
        tenant=row["tenant"],
        name=row["name"],
        tier=Tier(row["tier"]),
        models=None if row["models"] is None else frozenset(json.loads(row["models"])),
        created=row["created"],
        expires=row["expires"],
        revoked=row["revoked"],
        changed=row["changed"],
    )
