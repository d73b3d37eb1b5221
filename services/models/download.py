"""Files of a published model on their way to this disk: several at once, each in order, each verified before it gets its name.

Owns how bytes come; what to fetch and where is `pull`'s business, retrying the store's. A file is read in pieces, a few of them
at once, and written in order, so that its length says how far it is: the next start goes on there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from services.models.bucket import ObjectStore
from services.models.errors import ModelError
from services.models.partial import PartialFile, in_thread
from services.models.place import Place
from services.models.progress import Advance, Progress
from services.models.published import PublishedFile, file_object

PIECE_BYTES = 8 * 2**20
_FILES_AT_ONCE = 4
"""A file is checked and written by one thread: several files keep several cores busy."""


@dataclass(frozen=True, slots=True)
class Download:
    """`parallel`: reads at once, of `piece_bytes` each; memory is bounded by their product."""

    store: ObjectStore
    model: str
    place: Place
    progress: Progress
    parallel: int
    piece_bytes: int = PIECE_BYTES

    async def fetch(self, files: Sequence[PublishedFile], folder: Path) -> None:
        """All of `files` into `folder`. Raises `ModelError`, OSError: the first that went wrong."""
        at_once = min(_FILES_AT_ONCE, len(files))
        ahead = max(1, self.parallel // at_once)
        left = iter(files)
        with self.progress.bar(f"Fetching {self.model}", sum(file.bytes for file in files)) as advance:

            async def some() -> None:
                for file in left:
                    await self._file(file, folder, ahead, advance)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(some())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _file(self, file: PublishedFile, folder: Path, ahead: int, advance: Advance) -> None:
        with await in_thread(PartialFile, self.place.partial(file), file.bytes) as partial:
            advance(partial.size)
            await self._rest(partial, file, ahead, advance)
            if partial.sha256() != file.sha256 and partial.resumed:  # a crash may have lost what an earlier start wrote last
                self.progress.warn(f"what was here of {file.name} is damaged; fetching all of it again")
                advance(-partial.size)
                partial.start_over()
                await self._rest(partial, file, ahead, advance)
            if (found := partial.sha256()) != file.sha256:
                partial.start_over()
                raise ModelError(
                    f"{self.store.url}/{file_object(self.model, file)} is corrupt: its SHA-256 is {found[:12]}…; "
                    f"delete the object and push {self.model} again"
                )
            await in_thread(partial.finish, folder / file.name)

    async def _rest(self, partial: PartialFile, file: PublishedFile, ahead: int, advance: Advance) -> None:
        pieces = self._pieces(file_object(self.model, file), partial.size, file.bytes, ahead)
        async with aclosing(pieces):
            async for piece in pieces:
                await in_thread(partial.append, piece)
                advance(len(piece))

    async def _pieces(self, path: str, start: int, end: int, ahead: int) -> AsyncGenerator[bytes, None]:
        """Bytes [start, end) of the object in order, at most `ahead` reads at once."""
        reads: deque[asyncio.Task[bytes]] = deque()
        try:
            for offset in range(start, end, self.piece_bytes):
                reads.append(asyncio.create_task(self._read(path, offset, min(offset + self.piece_bytes, end))))
                if len(reads) == ahead:
                    yield await reads.popleft()
            while reads:
                yield await reads.popleft()
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, path: str, start: int, end: int) -> bytes:
        data = await self.store.read(path, start, end)
        if len(data) != end - start:
            raise ModelError(f"{self.store.url}/{path} ends after {start + len(data)} bytes: push {self.model} again")
        return data
