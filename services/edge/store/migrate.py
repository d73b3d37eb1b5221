"""Brings the tables up to date. Any number of edges may start at once: one migrates, the others wait and find it done.

Invariant: a migration is one transaction; a process that dies in the middle leaves the tables as they were.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import sqlalchemy as sa

from schemas.errors import StoreUnavailable
from services.edge.store.database import Database

PATIENCE_S = 60.0
_AGAIN_S = 0.2
_LOCK = 0x48454144  # "HEAD": the advisory lock of all that migrate here
_FOLDER = Path(__file__).parent / "migrations"


async def migrate(database: Database, patience: float = PATIENCE_S) -> None:
    """Tries for `patience` seconds: another edge may be at it. Raises `StoreUnavailable`, at once where waiting is of no use."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import alembic.command  # noqa: F401 - slow, so not inside the transaction

    deadline = asyncio.get_running_loop().time() + patience
    while True:
        try:
            return await _migrate(database, patience)
        except StoreUnavailable as error:
            cause = error.__cause__
            hopeless = isinstance(cause, OSError) or type(cause) is sa.exc.DatabaseError  # no way to it; no database at all
            if hopeless or asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(_AGAIN_S)


async def _migrate(database: Database, patience: float) -> None:
    async with database.write(patience) as connection:
        if not database.is_sqlite:  # there the transaction itself is the lock
            await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        await connection.run_sync(_upgrade)


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
