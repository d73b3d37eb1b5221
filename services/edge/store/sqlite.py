"""What a SQLite database needs beside its URL: one file that others may delete or replace, and a driver with threads.

Must not know tables. Invariants: the file is readable by its owner only, because prompts and answers lie in it; what is written
goes to the file that has the name now, so that others see it though the one before was deleted or replaced; no thread of the
driver outlives its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import aiosqlite
import sqlalchemy as sa
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

WRITES = "headrace_writes"
"""The option of an engine whose transactions write."""
BUSY_S = 2.0
"""How long SQLite waits for another process's transaction; less than the deadline, so that no thread outlives its caller."""
SYNCHRONOUS = "FULL"
"""What is committed is on the disk."""
_OPEN_S = 5.0
_FILE = "headrace_file"
_log = logging.getLogger("headrace.edge")


def use_file(engine: sa.Engine, path: Path) -> None:
    """Have `engine` use the file at `path` as this module says."""
    file = _File(path)
    sa.event.listen(engine, "do_connect", file.before_connect)
    sa.event.listen(engine, "checkout", file.before_use)
    sa.event.listen(engine, "connect", _set_up)
    sa.event.listen(engine, "begin", _begin)


async def open_whole(*arguments: Any, **options: Any) -> aiosqlite.Connection:
    """A connection. Who gives up meanwhile waits until it is open, which takes no time, and closed again.

    The driver's thread tells the event loop that the file is open, and fails if that is gone: nobody would wait for it.
    """
    connection = aiosqlite.connect(*arguments, **options)
    thread: Any = getattr(connection, "_thread", connection)  # it was one itself before 0.22
    thread.daemon = True  # as SQLAlchemy has it: the process may end before it
    opening = asyncio.ensure_future(connection)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait((opening,), timeout=_OPEN_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            await connection.close()
        raise


class _File:
    """SQLite goes on with a file that was deleted, where nobody else sees what it writes: such connections are made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def before_connect(self, _: Any, record: ConnectionPoolEntry, *__: Any) -> None:
        """SQLite gives its other files the mode of this one. Raises OSError.

        A file that is there is never opened here: to close it would end the locks of all this process's connections to it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if not os.access(self._path, os.R_OK | os.W_OK) or not self._path.is_file():
                raise
        record.info[_FILE] = self._identity()

    def before_use(self, _: Any, record: ConnectionPoolEntry, __: Any) -> None:
        if record.info[_FILE] != self._identity():
            _log.warning("the database's file was deleted or replaced; it is opened anew")
            raise DisconnectionError  # the pool closes this connection and makes another one

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


def _set_up(connection: Any, _: Any) -> None:
    """Write-ahead log: readers and the one writer do not wait for each other. What is deleted is overwritten."""
    connection.isolation_level = None  # transactions begin where we say, not where the driver thinks
    cursor = connection.cursor()
    busy = f"busy_timeout={BUSY_S * 1000:.0f}"
    for pragma in (busy, "journal_mode=WAL", f"synchronous={SYNCHRONOUS}", "secure_delete=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later can lose its turn without waiting; this one has it from the start.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(WRITES) else "BEGIN")
