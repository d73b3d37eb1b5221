"""`headrace keys`: API keys in the edges' database, from the shell of whoever runs it.

Works on the database and the home folder's secret directly, so that keys can be made before anything runs. A key's text is
printed once, by the command that makes it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial

from schemas.errors import StoreUnavailable
from services.cli.failure import CommandError
from services.edge.gate.keys import new_key
from services.edge.gate.records import KeyRecord
from services.edge.store.database import Database, database_url
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import migrate
from services.edge.tenant import server_secret
from services.settings import Settings

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COLUMNS = ("id", "tenant", "tier", "models", "state", "created", "name")

Make = Callable[..., Awaitable[KeyRecord]]


def create(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a new key's text."""
    if not _NAME.fullmatch(arguments.tenant):
        raise CommandError("--tenant: 1 to 64 letters, digits, '.', '_' or '-'")
    models = frozenset(arguments.models.split(",")) if arguments.models else None

    async def work(keys: SqlKeyStore) -> None:
        make = partial(keys.create, name=arguments.name, tier=arguments.tier, models=models, valid_s=arguments.expires)
        print(await _make(settings, make, arguments.tenant))

    return _run(settings, work)


def show(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a table of all keys."""

    async def work(keys: SqlKeyStore) -> None:
        rows = [_COLUMNS, *map(_row, await keys.all(arguments.tenant))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    return _run(settings, work)


def revoke(arguments: argparse.Namespace, settings: Settings) -> int:
    """The key is refused from now on, by every edge within a few seconds."""

    async def work(keys: SqlKeyStore) -> None:
        if await keys.end(arguments.id) is None:
            raise CommandError(f"there is no key {arguments.id}")

    return _run(settings, work)


def rotate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print a new key for the same tenant, tier and models; the old one ends after the grace period."""

    async def work(keys: SqlKeyStore) -> None:
        old = await keys.get(arguments.id)
        if old is None or old.revoked is not None:
            raise CommandError(f"there is no key {arguments.id} that is still valid")
        print(await _make(settings, partial(keys.create, name=old.name, tier=old.tier, models=old.models), old.tenant))
        await keys.end(old.id, arguments.grace)

    return _run(settings, work)


async def _make(settings: Settings, make: Make, tenant: str) -> str:
    made = new_key(server_secret(settings.home_dir), secrets.token_bytes)
    await make(made.id, made.digest, tenant)
    return made.text


def _row(record: KeyRecord) -> tuple[str, ...]:
    models = "all" if record.models is None else ",".join(sorted(record.models))
    return (record.id, record.tenant, record.tier, models, _state(record), _day(record.created), record.name)


def _state(record: KeyRecord) -> str:
    if record.revoked is not None:
        return f"revoked {_day(record.revoked)}"
    return "valid" if record.expires is None else f"until {_day(record.expires)}"


def _day(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _run(settings: Settings, work: Callable[[SqlKeyStore], Awaitable[None]]) -> int:
    async def whole() -> None:
        database = Database(database_url(settings.edge.database_url, settings.home_dir))
        try:
            await migrate(database)
            await work(SqlKeyStore(database))
        finally:
            await database.close()

    try:
        asyncio.run(whole())
    except StoreUnavailable as error:
        raise CommandError(f"{error.message} (edge.database_url)") from None
    return 0
