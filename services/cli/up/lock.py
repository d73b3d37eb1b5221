"""One `headrace up` a home folder: a lock that the kernel frees when its holder dies."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.failure import CommandError


@contextmanager
def only_one(home: Path, note: str) -> Iterator[None]:
    """Hold `home`; `note` tells the next one who does. Raises `CommandError` when another does."""
    path = home / "up.lock"
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write to {home}: {error.strerror}; set HEADRACE_HOME to a folder of yours") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CommandError(
                f"Headrace runs already in {home}: {file.read().strip()}. Stop that one with Ctrl-C, "
                "or give this one a HEADRACE_HOME and a PORT of its own"
            ) from None
        file.truncate(0)
        file.write(f"{note}\n")
        file.flush()
        yield
