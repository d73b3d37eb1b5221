"""API keys and tenants' limits as rows. Owns the SQL; knows digests only, never a key's text."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from schemas.errors import StoreUnavailable
from schemas.job import Tier
from services.edge.gate.limits import NONE, Limits
from services.edge.gate.records import KeyRecord, Unreadable
from services.edge.store.cells import limits_of, limits_text, models_of, models_text, readable
from services.edge.store.database import Database, database_time
from services.edge.store.tables import api_keys as keys
from services.edge.store.tables import tenants

_CHANGED = sa.func.coalesce(tenants.c.changed, 0.0)
_KEYS = sa.select(keys, tenants.c.limits.label("tenant_limits"), _CHANGED.label("tenant_changed")).select_from(
    keys.outerjoin(tenants, tenants.c.name == keys.c.tenant)
)


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
        limits: Limits = NONE,
        valid_s: float | None = None,
    ) -> None:
        """A new row. `valid_s`: it expires after so many seconds."""
        now = database_time()
        row: dict[str, Any] = {
            "id": key,
            "digest": digest,
            "tenant": tenant,
            "name": name,
            "tier": tier,
            "models": models_text(models),
            "limits": limits_text(limits),
            "created": now,
            "expires": None if valid_s is None else now + valid_s,
            "changed": now,
        }
        async with self._database.write() as connection:
            await connection.execute(sa.insert(keys).values(row))

    async def get(self, key: str) -> KeyRecord | None:
        """Raises `StoreUnavailable` also for a row that this build cannot read: another edge may know what it allows."""
        found = await self._select(_KEYS.where(keys.c.id == key))
        record = found[0] if found else None
        if isinstance(record, Unreadable):
            raise StoreUnavailable("This key's record cannot be read.", retry_after=1.0)
        return record

    async def changed_since(self, when: float) -> list[KeyRecord | Unreadable]:
        """Keys that changed, or whose tenant's limits did."""
        return await self._select(_KEYS.where(sa.or_(keys.c.changed >= when, when <= _CHANGED)))

    async def all(self, tenant: str | None = None) -> list[KeyRecord | Unreadable]:
        """Oldest first; of one tenant, or all."""
        query = _KEYS.order_by(keys.c.created, keys.c.id)
        return await self._select(query if tenant is None else query.where(keys.c.tenant == tenant))

    async def end(self, key: str, after_s: float = 0.0) -> bool:
        """The key ends, now or after so many seconds; one that ended before stays as it is. False: there is no such key."""
        now = database_time()
        change = {"revoked": now} if after_s == 0.0 else {"expires": now + after_s}
        longer = sa.or_(keys.c.expires.is_(None), keys.c.expires > now + after_s)
        alive = sa.and_(keys.c.id == key, keys.c.revoked.is_(None), longer)
        async with self._database.write() as connection:
            await connection.execute(sa.update(keys).where(alive).values(**change, changed=now))
            return await connection.scalar(sa.select(keys.c.id).where(keys.c.id == key)) is not None

    async def limit_tenant(self, tenant: str, limits: Limits) -> None:
        """In place of the limits that it had."""
        async with self._database.write() as connection:
            await connection.execute(sa.delete(tenants).where(tenants.c.name == tenant))
            row = {"name": tenant, "limits": limits_text(limits), "changed": database_time()}
            await connection.execute(sa.insert(tenants).values(row))

    async def tenant_limits(self) -> dict[str, Limits]:
        """By tenant, those that have any."""
        async with self._database.read() as connection:
            rows = (await connection.execute(sa.select(tenants).order_by(tenants.c.name))).mappings()
            return {row["name"]: limits_of(row["limits"]) for row in rows}

    async def _select(self, query: sa.Select[Any]) -> list[KeyRecord | Unreadable]:
        async with self._database.read() as connection:
            return [readable(_record, row, row["id"], _changed(row)) for row in (await connection.execute(query)).mappings()]


def _changed(row: Any) -> float:
    return float(max(row["changed"], row["tenant_changed"]))


def _record(row: Any) -> KeyRecord:
    return KeyRecord(
        id=row["id"],
        digest=row["digest"],
        tenant=row["tenant"],
        name=row["name"],
        tier=Tier(row["tier"]),
        models=models_of(row["models"]),
        created=row["created"],
        expires=row["expires"],
        revoked=row["revoked"],
        changed=_changed(row),
        limits=limits_of(row["limits"]),
        tenant_limits=limits_of(row["tenant_limits"]),
    )
