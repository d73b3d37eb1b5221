"""A published model, from a store to a folder of this machine: once a host, and what is here already is not fetched again.

Owns the order of steps: what lacks, is all of it in the store, does it fit, fetch it (`download`), make it the current one. Knows
no library and no retries (`bucket`, `patience`). Invariant: the folder that `Pull.run` returns holds every file that was asked
for, each with the checksum that the manifest names.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.clock import Clock
from services.models.bucket import ObjectStore
from services.models.download import PIECE_BYTES, Download
from services.models.errors import Missing, ModelError
from services.models.lock import exclusive_async
from services.models.partial import in_thread
from services.models.place import Place
from services.models.progress import Progress
from services.models.published import (
    MAX_MANIFEST_BYTES,
    Published,
    PublishedFile,
    decode,
    file_object,
    manifest_object,
)
from services.models.whole import lacking, write_local_manifest


async def read_published(store: ObjectStore, model: str) -> Published:
    """The manifest of `model`. Raises `Missing` for a model that nobody published, `ModelError`."""
    path = manifest_object(model)
    try:
        data = await store.read(path, 0, MAX_MANIFEST_BYTES)
    except Missing:
        raise Missing(f"there is no model {model!r} in {store.url} (no {path}): push it with `headrace models push`") from None
    return decode(data, f"{store.url}/{path}")


@dataclass(frozen=True, slots=True)
class Pull:
    """One model, one machine. `parallel`: reads at once, of `piece_bytes` each."""

    store: ObjectStore
    model: str
    home: Path
    clock: Clock
    progress: Progress
    deadline_s: float
    parallel: int
    piece_bytes: int = PIECE_BYTES

    async def run(self, published: Published, *, weights: bool) -> Path:
        """The folder that holds the model. Any number of processes may call this at once; one of them fetches.

        Raises `ModelError` with one line that says what to do.
        """
        place = Place(self.home, self.model)
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._pull(place, published, weights)
        except TimeoutError:
            raise ModelError(
                f"{self.model} was not fetched from {self.store.url} in {self.deadline_s:g} s (store.deadline_s); "
                "the next start goes on where this one ended"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ModelError(f"the disk of {place.root} is full: make room, and start again to go on") from None
            raise ModelError(f"cannot write {place.root}: {error.strerror or error}") from None

    async def _pull(self, place: Place, published: Published, weights: bool) -> Path:
        folder, wanted = place.folder(published.revision), published.wanted(weights=weights)
        if place.is_current(published.revision) and not await in_thread(lacking, folder, wanted, read_weights=False):
            return folder
        await in_thread(place.make, published.revision)
        async with exclusive_async(place.lock, self.clock, self.progress, limit_s=self.deadline_s):
            # Another process may have fetched it while we waited.
            if left := await in_thread(lacking, folder, wanted, read_weights=True):
                await self._look(left)
                self._check_room(place, left)
                await Download(self.store, self.model, place, self.progress, self.parallel, self.piece_bytes).fetch(left, folder)
            if weights:
                await in_thread(write_local_manifest, folder, published)
            await in_thread(place.publish, published)
        return folder

    async def _look(self, files: Sequence[PublishedFile]) -> None:
        """Is all of it there, and as long as it should be? Asked before the first byte, not found after an hour."""

        async def look(file: PublishedFile) -> None:
            path = file_object(self.model, file)
            try:
                size = await self.store.size(path)
            except Missing:
                raise ModelError(f"{self.store.url} lacks {path}, which the manifest names: push {self.model} again") from None
            if size != file.bytes:
                raise ModelError(
                    f"{self.store.url}/{path} has {size} bytes, the manifest says {file.bytes}: push {self.model} again"
                )

        for start in range(0, len(files), self.parallel):
            await asyncio.gather(*map(look, files[start : start + self.parallel]))

    def _check_room(self, place: Place, files: Sequence[PublishedFile]) -> None:
        needed = sum(file.bytes - place.begun(file) for file in files)
        free = shutil.disk_usage(place.root).free
        if free < needed:
            raise ModelError(
                f"the disk of {place.root} is too full: {self.model} needs {needed / 1e6:.0f} MB more, {free / 1e6:.0f} MB are "
                "free; make room or set HEADRACE_HOME to another disk"
            )
