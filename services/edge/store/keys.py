"""API keys and tenants' limits as rows. Owns the SQL; knows digests only, never a key's text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.job import Tier
from services.edge.gate.limits import NONE, Limits
from services.edge.gate.records import KeyRecord
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
            "models": None if models is None else json.dumps(sorted(models)),
            "limits": _text(limits),
            "created": now,
            "expires": None if valid_s is None else now + valid_s,
            "changed": now,
        }
        async with self._database.write() as connection:
            await connection.execute(sa.insert(keys).values(row))

    async def get(self, key: str) -> KeyRecord | None:
        async with self._database.read() as connection:
            return await _one(connection, key)

    async def changed_since(self, when: float) -> list[KeyRecord]:
        """Keys that changed, or whose tenant's limits did."""
        return await self._select(_KEYS.where(sa.or_(keys.c.changed >= when, when <= _CHANGED)))

    async def all(self, tenant: str | None = None) -> list[KeyRecord]:
        """Oldest first; of one tenant, or all."""
        query = _KEYS.order_by(keys.c.created, keys.c.id)
        return await self._select(query if tenant is None else query.where(keys.c.tenant == tenant))

    async def end(self, key: str, after_s: float = 0.0) -> KeyRecord | None:
        """The key ends, now or after so many seconds; one that ended before stays as it is. None: there is no such key."""
        now = database_time()
        change = {"revoked": now} if after_s == 0.0 else {"expires": now + after_s}
        longer = sa.or_(keys.c.expires.is_(None), keys.c.expires > now + after_s)
        alive = sa.and_(keys.c.id == key, keys.c.revoked.is_(None), longer)
        async with self._database.write() as connection:
            await connection.execute(sa.update(keys).where(alive).values(**change, changed=now))
            return await _one(connection, key)

    async def limit_tenant(self, tenant: str, limits: Limits) -> None:
        """In place of the limits that it had."""
        async with self._database.write() as connection:
            await connection.execute(sa.delete(tenants).where(tenants.c.name == tenant))
            row = {"name": tenant, "limits": _text(limits), "changed": database_time()}
            await connection.execute(sa.insert(tenants).values(row))

    async def tenant_limits(self) -> dict[str, Limits]:
        """By tenant, those that have any."""
        async with self._database.read() as connection:
            rows = (await connection.execute(sa.select(tenants).order_by(tenants.c.name))).mappings()
            return {row["name"]: _limits(row["limits"]) for row in rows}

    async def _select(self, query: sa.Select[Any]) -> list[KeyRecord]:
        async with self._database.read() as connection:
            return [_record(row) for row in (await connection.execute(query)).mappings()]


async def _one(connection: AsyncConnection, key: str) -> KeyRecord | None:
    row = (await connection.execute(_KEYS.where(keys.c.id == key))).mappings().one_or_none()
    return None if row is None else _record(row)


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
        changed=max(row["changed"], row["tenant_changed"]),
        limits=_limits(row["limits"]),
        tenant_limits=_limits(row["tenant_limits"]),
    )


def _text(limits: Limits) -> str:
    return msgspec.json.encode(limits).decode()


def _limits(text: str | None) -> Limits:
    return NONE if text is None else msgspec.json.decode(text, type=Limits)
