"""The API key that `headrace up` prints: made once, kept in the home folder, readable by its owner only.

Callers on this machine need none; it is for the other ones, and for clients that insist. Invariant: what is printed is valid.
"""

from __future__ import annotations

import asyncio
import secrets

from schemas.errors import StoreUnavailable
from services.cli.failure import CommandError
from services.cli.up.credentials import write_private
from services.edge.gate.keys import digest, key_id, new_key, same
from services.edge.store.database import Database, database_url
from services.edge.store.keys import SqlKeyStore
from services.edge.store.migrate import migrate
from services.edge.tenant import DEFAULT, server_secret
from services.settings import Settings

_FILE = "development.key"


def development_key(settings: Settings) -> str:
    """The key's text. Raises `CommandError` when the database cannot be used."""
    secret, path = server_secret(settings.home_dir), settings.home_dir / _FILE
    known = path.read_text().strip() if path.exists() else ""
    try:
        text = asyncio.run(_valid_or_new(settings, secret, known))
    except StoreUnavailable as error:
        raise CommandError(f"{error.message} (edge.database_url)") from None
    if text != known:
        write_private(path, text + "\n")
    return text


async def _valid_or_new(settings: Settings, secret: bytes, known: str) -> str:
    database = Database(database_url(settings.edge.database_url, settings.home_dir))
    try:
        await migrate(database)
        keys = SqlKeyStore(database)
        if await _valid(keys, secret, known):
            return known
        made = new_key(secret, secrets.token_bytes)
        await keys.create(made.id, made.digest, DEFAULT, name="made by headrace up")
        return made.text
    finally:
        await database.close()


async def _valid(keys: SqlKeyStore, secret: bytes, text: str) -> bool:
    record = await keys.get(key_id(text) or "")
    return record is not None and record.revoked is None and same(record.digest, digest(secret, text))
