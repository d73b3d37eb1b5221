"""One password a NATS user, made once and kept under the home folder, readable by its owner only.

Invariant: a process gets the password of its own role and no other.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.cli.failure import CommandError

USERS: Final = ("system", "operator", "supervisor", "edge", "router", "prefill", "decode", "both")
"""The users of infra/nats/permissions.conf. A worker's user is its role."""
_FILE = "passwords.json"


def load_or_create(folder: Path) -> Mapping[str, str]:
    """The password of each user; missing ones are made. Raises `CommandError` for a file that was damaged by hand."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _FILE
    known = _read(path) if path.exists() else {}
    passwords = {user: known.get(user) or secrets.token_hex(24) for user in USERS}
    if passwords != known:
        write_private(path, json.dumps(passwords, indent=2) + "\n")
    return passwords


def write_private(path: Path, text: str) -> None:
    """Replace `path` in one step by a file that only its owner may read."""
    scratch = path.with_name(f".{path.name}.new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # also when an earlier, killed start left it behind
        file.write(text)
    scratch.replace(path)


def _read(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CommandError(f"{path} is damaged: delete it and start again, new passwords are made")
    return value
