"""Tables of any older build, with rows in them, become those that this one uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL

from schemas.errors import StoreUnavailable
from services.edge.store import migrations
from services.edge.store.database import Database
from services.edge.store.jobs import SqlJobStore
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import migrate
from services.edge.store.tables import metadata
from tests.waiting import PATIENCE_S

FOLDER = Path(migrations.__file__).parent


def config(connection: sa.Connection | None = None) -> Config:
    made = Config()
    made.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


REVISIONS = [each.revision for each in ScriptDirectory.from_config(config()).walk_revisions()][::-1]


@pytest.fixture
async def empty(url: URL) -> AsyncIterator[Database]:
    """Without tables."""
    made = Database(url)
    yield made
    await made.close()


def value(column: sa.Column[Any]) -> object:
    kinds: dict[type, object] = {int: 1, float: 1.5, bool: True, bytes: b"{}", str: "{}"}
    return kinds[column.type.python_type]


def fill(connection: sa.Connection, revision: str) -> dict[str, dict[str, Any]]:
    """The tables of that revision, with a row in each; by table."""
    command.upgrade(config(connection), revision)
    tables = sa.MetaData()
    tables.reflect(connection)
    rows = {}
    for name, table in tables.tables.items():
        if name != "alembic_version":
            rows[name] = {column.name: value(column) for column in table.columns}
            connection.execute(sa.insert(table), rows[name])
    return rows


def read(connection: sa.Connection, table: str) -> dict[str, Any]:
    return dict(connection.execute(sa.select(metadata.tables[table])).mappings().one())


def differences(connection: sa.Connection) -> list[Any]:
    return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)


@pytest.mark.parametrize("revision", REVISIONS)
async def test_from_every_revision_with_its_rows(empty: Database, revision: str) -> None:
    async with empty.write(PATIENCE_S) as connection:  # as long as a migration may take
        rows = await connection.run_sync(fill, revision)
    assert rows
    await migrate(empty)
    async with empty.read() as connection:
        assert await connection.run_sync(differences) == []
        for table, row in rows.items():
            assert row.items() <= (await connection.run_sync(read, table)).items()
        assert (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).scalars().all() == REVISIONS[-1:]
    assert await SqlKeyStore(empty).all() is not None
    await SqlJobStore(empty).create("a" * 32, "acme", b"", "e1", 15.0)


async def test_migrations_that_fail_leave_the_tables_as_they_were(empty: Database) -> None:
    """Also those before the one that failed: they are one transaction."""

    def tables(connection: sa.Connection) -> list[str]:
        return sorted(sa.inspect(connection).get_table_names())

    async with empty.write(PATIENCE_S) as connection:
        await connection.run_sync(fill, REVISIONS[0])
        await connection.execute(sa.text("CREATE TABLE budgets (x INTEGER)"))  # a later one makes it, too
        before = await connection.run_sync(tables)
    with pytest.raises(StoreUnavailable):
        await migrate(empty, 0.1)
    async with empty.read() as connection:
        assert await connection.run_sync(tables) == before
