"""The API key that `headrace up` prints: made once, kept in the home folder, readable by its owner only.

Callers on this machine need none; it is for the other ones, and for clients that insist. Invariant: what is printed is valid.
"""

from __future__ import annotations

import secrets

from services.cli.database import with_keys
from services.cli.up.credentials import write_private
from services.edge.gate.keys import digest, key_id, new_key, same
from services.edge.store.keys import SqlKeyStore
from services.edge.tenant import DEFAULT, server_secret
from services.settings.settings import Settings

_FILE = "development.key"


def development_key(settings: Settings) -> str:
    """The key's text. Raises `CommandError` when the database cannot be used."""
    secret, path = server_secret(settings.home_dir), settings.home_dir / _FILE
    known = path.read_text().strip() if path.exists() else ""

    async def valid_or_new(keys: SqlKeyStore) -> str:
        if await _valid(keys, secret, known):
            return known
        made = new_key(secret, secrets.token_bytes)
        await keys.create(made.id, made.digest, DEFAULT, name="made by headrace up")
        return made.text

    text = with_keys(settings, valid_or_new)
    if text != known:
        write_private(path, text + "\n")
    return text


async def _valid(keys: SqlKeyStore, secret: bytes, text: str) -> bool:
    record = await keys.get(key_id(text) or "")
    return record is not None and record.revoked is None and same(record.digest, digest(secret, text))
