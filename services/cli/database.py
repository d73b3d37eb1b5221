"""The edges' database, for one command: opened, brought up to date, closed. What goes wrong with it is one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import StoreUnavailable
from services.cli.failure import CommandError
from services.edge.store.database import Database, database_url
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import PATIENCE_S, migrate
from services.settings.settings import Settings

T = TypeVar("T")


def with_database(settings: Settings, work: Callable[[Database], Awaitable[T]]) -> T:
    """What `work` returns; a busy disk is waited for longer than by a request. Raises `CommandError` when the database cannot be
    used."""

    async def whole() -> T:
        database = Database(database_url(settings.edge.database_url, settings.home_dir), PATIENCE_S)
        try:
            await migrate(database)
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(whole())
    except StoreUnavailable as error:
        cause = f"{error.__cause__ or ''}".partition("\n")[0]
        raise CommandError(f"{error.message} (edge.database_url{f': {cause}' if cause else ''})") from None


def with_keys(settings: Settings, work: Callable[[SqlKeyStore], Awaitable[T]]) -> T:
    """The same, of its keys."""
    return with_database(settings, lambda database: work(SqlKeyStore(database)))
