"""One database: how to reach it, its transactions with a deadline, its clock; what differs between SQLite and PostgreSQL.

Must not know tables. Invariants: whatever the database does, a caller waits no longer than its deadline and gets
`StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from schemas.errors import StoreUnavailable
from services.edge.store.sqlite import BUSY_S, WRITES, open_whole, use_file
from services.settings.errors import SettingsError

TIMEOUT_S = 5.0
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
LONGEST_NAME = 128


class database_time(FunctionElement[float]):
    """Now by the database's clock, in Unix seconds."""

    type = sa.Double()
    inherit_cache = True


@compiles(database_time, "sqlite")
def _sqlite_time(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_time, "postgresql")
def _postgresql_time(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def has_name(column: sa.Column[str], name: str) -> sa.ColumnElement[bool]:
    """`name` is what a caller says: nothing has a name that no database takes, or that we would not give."""
    return column == name if name.isascii() and name.isprintable() and len(name) <= LONGEST_NAME else sa.false()


def database_url(configured: str, home: Path) -> URL:
    """`configured`, with the async driver; a file in `home` when it is empty. Raises `SettingsError`."""
    if not configured:
        return URL.create(_DRIVERS["sqlite"], database=str(home / "edge.db"))
    try:
        url = make_url(configured)
    except (ArgumentError, ValueError):
        raise SettingsError("edge.database_url: not a database URL") from None  # it may hold a password: not repeated
    kind = url.get_backend_name()
    if kind not in _DRIVERS:
        raise SettingsError(f"edge.database_url: {kind} is not supported, only {' and '.join(_DRIVERS)}")
    if kind == "postgresql" and find_spec("asyncpg") is None:
        raise SettingsError("edge.database_url: PostgreSQL is the extra 'postgres' (in a checkout: pip install -e '.[postgres]')")
    if kind == "sqlite" and (not url.database or url.database == ":memory:" or url.database.startswith("file:")):
        raise SettingsError("edge.database_url: SQLite needs the path of a file, sqlite:////path/to/edge.db")
    for option in url.query.keys() - _options(kind):
        raise SettingsError(f"edge.database_url: {kind} has no option {option!r}")
    return url.set(drivername=_DRIVERS[kind])


def _options(kind: str) -> frozenset[str]:
    """What may follow the `?`."""
    if kind == "sqlite":
        return frozenset()
    from asyncpg import connect

    return frozenset(signature(connect).parameters) | {"prepared_statement_cache_size"}


def insert_new(connection: AsyncConnection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that leaves rows alone which are there already."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return postgresql.insert(table).on_conflict_do_nothing()


class Database:
    """Connections to `url`; made when they are needed."""

    def __init__(self, url: URL, timeout: float = TIMEOUT_S) -> None:
        self._timeout = timeout
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._writing = asyncio.Lock()
        self._engine = create_async_engine(
            url,
            connect_args={"async_creator_fn": open_whole} if self.is_sqlite else {},
            pool_size=4,
            max_overflow=4,
            pool_timeout=timeout,
            hide_parameters=True,
        )
        self._writer = self._engine.execution_options(**{WRITES: True})
        if self.is_sqlite:
            use_file(self._engine.sync_engine, Path(url.database or ""))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """One consistent look. Raises `StoreUnavailable`."""
        async with _deadline(self._timeout), self._engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def write(self, timeout: float = 0.0) -> AsyncIterator[AsyncConnection]:
        """One transaction, the only one on SQLite. Raises `StoreUnavailable`: it may have been committed all the same."""
        timeout = timeout or self._timeout
        async with _deadline(timeout), self._turn(timeout), self._writer.begin() as connection:
            yield connection

    @asynccontextmanager
    async def _turn(self, timeout: float) -> AsyncIterator[None]:
        """Of those that wait SQLite lets in whoever looks at the right moment, and some never: ours write in the order they came.

        Who could wait for another process only beyond the deadline does not begin.
        """
        if not self.is_sqlite:
            yield
            return
        async with asyncio.timeout(timeout - BUSY_S):
            await self._writing.acquire()
        try:
            yield
        finally:
            self._writing.release()

    async def close(self) -> None:
        async with asyncio.timeout(self._timeout):
            await self._engine.dispose()


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise StoreUnavailable("The database did not answer in time.", retry_after=1.0) from None
    except (SQLAlchemyError, OSError) as error:
        raise StoreUnavailable("The database cannot be used now.", retry_after=1.0) from error
