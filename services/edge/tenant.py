"""Whose request it is. Without keys there is one tenant, `default`.

Owns the server secret, from which a tenant's lane and cache salt are derived; it never leaves this host's home folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from schemas.job import LANES
from services.kv.hashing import cache_salt

DEFAULT = "default"
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """`lane`: where its jobs queue, 0..15. `salt` keys its prefix cache."""

    name: str
    lane: int
    salt: bytes


def tenant(secret: bytes, name: str = DEFAULT) -> Tenant:
    digest = hashlib.blake2b(name.encode(), key=secret, digest_size=8, person=b"hr-lane").digest()
    return Tenant(name, int.from_bytes(digest, "big") % LANES, cache_salt(secret, name))


def server_secret(home: Path) -> bytes:
    """The secret in `home`, made at the first start; readable by its owner only. Raises OSError, also for a damaged one."""
    path = home / "secret"
    home.mkdir(parents=True, exist_ok=True)
    fresh = home / f".secret.{os.getpid()}.tmp"
    if not path.exists():
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            os.link(fresh, path)  # whole or not at all, and another process may be first
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    secret = path.read_bytes()
    if len(secret) != _BYTES:
        raise OSError(f"{path} is damaged: delete it, and the next start makes a new one")
    return secret
