"""Files, URLs, migrations: also when several edges start at once."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.engine import URL

from schemas.errors import StoreUnavailable
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from services.edge.store.migrate import migrate
from services.edge.store.sqlite import BUSY_S
from services.edge.store.tables import metadata
from services.settings.errors import SettingsError
from tests.waiting import PATIENCE_S, until

_MIGRATE = """
import asyncio, sys
from pathlib import Path
from typing import Any
from services.edge.store.database import Database, database_url
from services.edge.store.migrate import migrate
async def main():
    database = Database(database_url(sys.argv[1], Path()))
    await migrate(database)
    await database.close()
asyncio.run(main())
"""


async def test_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    async with database.read() as connection:
        differences = await connection.run_sync(lambda sync: compare_metadata(MigrationContext.configure(sync), metadata))
    assert differences == []


async def test_a_second_start_changes_nothing(database: Database) -> None:
    await migrate(database)
    async with database.read() as connection:
        assert (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).all() == [("0006",)]


def test_edges_that_start_at_once(url: URL) -> None:
    text = url.render_as_string(hide_password=False)
    started = [subprocess.Popen([sys.executable, "-c", _MIGRATE, text], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error


def modes(folder: Path) -> dict[str, int]:
    return {name: os.stat(folder / name).st_mode & 0o777 for name in os.listdir(folder)}


async def test_the_files_are_private(sqlite: Database, tmp_path: Path) -> None:
    await migrate(sqlite)
    assert modes(tmp_path) == {"edge.db": 0o600, "edge.db-wal": 0o600, "edge.db-shm": 0o600}


async def test_a_deleted_file_is_written_no_more(sqlite: Database, tmp_path: Path) -> None:
    """Nobody else would see it. What is made in its place is as private."""
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    with pytest.raises(StoreUnavailable):
        await SqlJobStore(sqlite).create("a" * 32, "t", b"", "e1", 15.0)
    await migrate(sqlite)
    await SqlJobStore(sqlite).create("b" * 32, "t", b"", "e1", 15.0)
    assert modes(tmp_path) == {"edge.db": 0o600, "edge.db-wal": 0o600, "edge.db-shm": 0o600}
    other = Database(database_url("", tmp_path))
    assert await SqlJobStore(other).get("b" * 32, "t") is not None
    await other.close()


async def test_a_file_put_in_its_place_is_used(sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    backup = Database(database_url("", tmp_path / "backup"))
    await migrate(backup)
    await SqlJobStore(backup).create("a" * 32, "t", b"", "e1", 15.0)
    await backup.close()
    assert await SqlJobStore(sqlite).get("a" * 32, "t") is None
    for name in ("edge.db-wal", "edge.db-shm"):
        (tmp_path / name).unlink()
    (tmp_path / "backup" / "edge.db").replace(tmp_path / "edge.db")
    assert await SqlJobStore(sqlite).get("a" * 32, "t") is not None


@pytest.mark.parametrize(
    ("configured", "becomes"),
    [
        ("", "sqlite+aiosqlite:////home/edge.db"),
        ("sqlite:////data/x.db", "sqlite+aiosqlite:////data/x.db"),
        ("postgresql://u:p@db:5432/headrace", "postgresql+asyncpg://u:***@db:5432/headrace"),
        ("postgresql+psycopg://u:p@db/headrace", "postgresql+asyncpg://u:***@db/headrace"),
        ("postgresql://u:p@db/headrace?ssl=require", "postgresql+asyncpg://u:***@db/headrace?ssl=require"),
    ],
)
def test_a_url_gets_its_driver(configured: str, becomes: str) -> None:
    assert str(database_url(configured, Path("/home"))) == becomes


@pytest.mark.parametrize(
    "configured",
    [
        "not a url:secret",
        "mysql://u:secret@db/x",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:////data/x.db?mode=secret",
        "postgresql://u:secret@db/x?sslmode=secret",
    ],
)
def test_another_url_is_refused_by_name_without_its_password(configured: str) -> None:
    with pytest.raises(SettingsError, match=r"edge\.database_url") as refused:
        database_url(configured, Path("/home"))
    assert "secret" not in str(refused.value)


async def test_a_path_that_cannot_be_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "edge.db").mkdir()
    database = Database(database_url("", tmp_path))
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(PATIENCE_S):
            await migrate(database, 1e6)  # nothing is to be waited for
    await database.close()


async def test_a_database_that_cannot_be_had_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "edge.db").write_bytes(b"this is no database, and long enough for SQLite to see that" * 40)
    database = Database(database_url("", tmp_path))
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(PATIENCE_S):
            await migrate(database, 1e6)  # nothing is to be waited for
    await database.close()


async def test_the_clock_is_the_databases(database: Database) -> None:
    from services.edge.store.database import database_time

    async with database.read() as connection:
        first = (await connection.execute(sa.select(database_time()))).scalar_one()
        await asyncio.sleep(0.01)
        assert first < (await connection.execute(sa.select(database_time()))).scalar_one() < first + 60


async def test_who_came_first_writes_first(sqlite: Database) -> None:
    """SQLite lets in whoever looks at the right moment: of thirty at once some were refused, and others wrote four times."""
    wrote: list[int] = []

    async def write(number: int) -> None:
        async with sqlite.write():
            wrote.append(number)

    async with sqlite.write():
        waiting = [asyncio.create_task(write(number)) for number in range(30)]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert wrote == list(range(30))


async def test_who_could_only_wait_beyond_the_deadline_does_not_begin(sqlite: Database, tmp_path: Path) -> None:
    """One of ours waits in SQLite, and the others for their turn: no thread of the driver outlives its caller."""
    mine, began = Database(database_url("", tmp_path), BUSY_S + 0.1), list[int]()
    sa.event.listen(mine._engine.sync_engine, "connect", lambda *_: began.append(1))

    async def write() -> None:
        with pytest.raises(StoreUnavailable):
            async with mine.write():
                pass

    async with sqlite.write(2 * PATIENCE_S):
        await asyncio.gather(*(write() for _ in range(3)))
    assert len(began) == 1
    await mine.close()


_VISIT = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM alembic_version').fetchall(); c.close()"


async def test_a_new_connection_ends_no_lock_of_an_older_one(tmp_path: Path) -> None:
    """POSIX: closing any descriptor of a file drops all locks that the process has on it. Another process that closes the
    database would then take itself for the last one, and delete the log that we write to."""
    database, log = Database(database_url("", tmp_path)), tmp_path / "edge.db-wal"
    await migrate(database)
    async with database.read() as first, database.read() as second:
        for connection in (first, second):
            await connection.execute(sa.text("SELECT * FROM alembic_version"))
    before = log.stat().st_ino
    argv = [sys.executable, "-c", _VISIT, str(tmp_path / "edge.db")]
    visit = await asyncio.create_subprocess_exec(*argv)
    assert await asyncio.wait_for(visit.wait(), 30) == 0
    assert log.stat().st_ino == before
    await database.close()


async def test_who_gives_up_while_the_file_is_opened_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's thread speaks to the event loop when the file is open; the loop may be closed by then."""
    opening, go_on, opened = threading.Event(), threading.Event(), sqlite3.connect

    def slowly(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opening.set()
        assert go_on.wait(PATIENCE_S)
        return opened(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", slowly)
    database, before = Database(database_url("", tmp_path)), set(threading.enumerate())
    migrating = asyncio.create_task(migrate(database))
    await until(opening.is_set)
    migrating.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await migrating
    assert go_on.is_set(), "it waited for its thread"
    await database.close()
    await until(lambda: not any(thread.is_alive() for thread in threading.enumerate() if thread not in before))
