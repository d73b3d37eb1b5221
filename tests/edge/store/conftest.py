"""Every test here runs on SQLite and on PostgreSQL, both for real; `sqlite` is for what only SQLite does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from tests.edge.migrated import migrated
from tests.postgres_fixture import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> URL:
    """Of an empty database."""
    if request.param == "sqlite":
        return database_url("", tmp_path)
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
async def database(url: URL) -> AsyncIterator[Database]:
    async with migrated(url) as made:
        yield made


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Database]:
    async with migrated(database_url("", tmp_path)) as made:
        yield made


@pytest.fixture
def store(database: Database) -> SqlJobStore:
    return SqlJobStore(database)
