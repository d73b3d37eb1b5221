"""A file on its way: its first bytes on disk, the checksum of them in memory.

Owns one file that grows in place until it is whole, and then gets its name; a start that was killed leaves it, and the next one
goes on behind what is there. Invariant: a file under its final name has the checksum it was asked for, and is on the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CHUNK = 1 << 22


class PartialFile:
    """Blocking calls all: a thread makes them. `resumed`: bytes that an earlier start left."""

    def __init__(self, path: Path, limit: int) -> None:
        """Raises OSError. What is longer than `limit` bytes is no beginning of it."""
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._sum = hashlib.sha256()
        self.size = 0
        if os.fstat(self._file.fileno()).st_size > limit:
            self._file.truncate(0)
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK):
            self._sum.update(chunk)
            self.size += len(chunk)
        self.resumed = self.size

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # an unbuffered file may take less than it is given
            view = view[self._file.write(view) :]
        self._sum.update(data)
        self.size += len(data)

    def start_over(self) -> None:
        """Forget all of it."""
        self._file.truncate(0)
        self._sum = hashlib.sha256()
        self.size = self.resumed = 0

    def sha256(self) -> str:
        """In hex, of what is there so far."""
        return self._sum.hexdigest()

    def finish(self, target: Path) -> None:
        """On the disk, then under its name."""
        os.fsync(self._file.fileno())
        self._path.replace(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call(...)` in a thread. A caller that is cancelled waits for its end: nothing is written behind its back."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def sha256_of(path: Path) -> str:
    """In hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
