"""One process at a time prepares a model: a lock file that the kernel frees when its holder dies."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from services.clock import Clock
from services.models.errors import ModelError
from services.models.progress import Progress

_POLL_S = 0.1


@contextmanager
def exclusive(path: Path, clock: Clock, progress: Progress, *, limit_s: float) -> Iterator[None]:
    """Holds the lock at `path`. Raises `ModelError` when another process still holds it after `limit_s`."""
    with path.open("w") as file:
        for pause in _attempts(file.fileno(), path, clock, progress, limit_s):
            time.sleep(pause)
        yield


@asynccontextmanager
async def exclusive_async(path: Path, clock: Clock, progress: Progress, *, limit_s: float) -> AsyncIterator[None]:
    """`exclusive`, where other tasks run on while this one waits."""
    with path.open("w") as file:
        for pause in _attempts(file.fileno(), path, clock, progress, limit_s):
            await asyncio.sleep(pause)
        yield


def _attempts(descriptor: int, path: Path, clock: Clock, progress: Progress, limit_s: float) -> Iterator[float]:
    """Seconds to wait before each next try, until the lock is held."""
    deadline = clock.monotonic() + limit_s
    announced = False
    while not _try_lock(descriptor):
        if not announced:
            progress.say("Another process is preparing this model; waiting for it.")
            announced = True
        if clock.monotonic() >= deadline:
            raise ModelError(f"another process has held {path} for {limit_s:.0f} s; stop it and start again")
        yield _POLL_S


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
