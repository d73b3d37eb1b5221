"""A database with its tables, for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.engine import URL

from services.edge.store.database import Database
from services.edge.store.migrate import migrate
from tests.waiting import PATIENCE_S


@asynccontextmanager
async def migrated(url: URL) -> AsyncIterator[Database]:
    database = Database(url, PATIENCE_S)
    try:
        await migrate(database)
        yield database
    finally:
        await database.close()
