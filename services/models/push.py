"""A model of this machine into a store, for others to pull.

Owns the order: read every file once, send what the store lacks, the manifest last. Objects are addressed by their content, so a
push of the same model sends nothing, one that was interrupted goes on with the file it was at, and who is pulling another
revision meanwhile is not touched. Nothing is ever deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import xxhash

from services.models.bucket import ObjectStore
from services.models.errors import Forbidden, Missing, ModelError, Trouble
from services.models.manifest import MANIFEST, FileSum, identify
from services.models.progress import Advance, Progress
from services.models.published import (
    LOADABLE,
    WEIGHTS,
    Published,
    PublishedFile,
    checked_model,
    encode,
    file_object,
    manifest_object,
    wrong_names,
)
from services.models.pull import read_published
from services.models.store import ModelFiles

_CHUNK = 1 << 22


async def push(store: ObjectStore, files: ModelFiles, model: str, progress: Progress, *, deadline_s: float) -> Published:
    """Publish `files` as `model`. Raises `ModelError` with one line that says what to do."""
    checked_model(model)
    try:
        async with asyncio.timeout(deadline_s):
            return await _push(store, files, model, progress)
    except TimeoutError:
        raise ModelError(f"{model} was not pushed in {deadline_s:g} s (store.deadline_s); the next push goes on") from None
    except OSError as error:
        raise ModelError(f"cannot read {files.folder}: {error.strerror or error}") from None


async def _push(store: ObjectStore, files: ModelFiles, model: str, progress: Progress) -> Published:
    paths = chosen_files(files, progress)
    with progress.bar(f"Reading {model}", sum(path.stat().st_size for path in paths)) as advance:
        published = await asyncio.to_thread(summarise, files, paths, advance)
    with progress.bar(f"Pushing {model}", published.bytes) as advance:
        for file, path in zip(published.files, paths, strict=True):
            if await _size(store, file_object(model, file)) != file.bytes:
                await _send(store, file_object(model, file), path, file)
            advance(file.bytes)
    if await _current(store, model) == published:
        progress.say(f"{model} is in {store.url} already, the same in every byte.")
    else:
        await store.write(manifest_object(model), encode(published))
    return published


async def _current(store: ObjectStore, model: str) -> Published | None:
    """What is published now; a manifest that cannot be read is none."""
    try:
        return await read_published(store, model)
    except (Forbidden, Trouble):
        raise
    except ModelError:
        return None


def chosen_files(files: ModelFiles, progress: Progress) -> list[Path]:
    """Of the model's folder what may be loaded; says what is left out. Raises `ModelError` for a model that lacks a file."""
    entries = sorted(entry for entry in files.folder.iterdir() if not entry.name.startswith(".") and entry.name != MANIFEST)
    chosen = [
        entry
        for entry in entries
        if entry.is_file() and entry.name.endswith(LOADABLE) and (not entry.name.endswith(WEIGHTS) or entry in files.safetensors)
    ]
    if left := [entry.name for entry in entries if entry not in chosen]:
        progress.say(f"Left out, as no part of a model that Headrace loads: {', '.join(left)}")
    if reason := wrong_names(path.name for path in chosen):
        raise ModelError(f"{files.folder} {reason}")
    return chosen


def summarise(files: ModelFiles, paths: Sequence[Path], advance: Advance) -> Published:
    """Reads every byte of `paths` once."""
    published = [_summed(path, advance) for path in paths]
    by_name = {file.name: file for file in published}
    sums = [
        FileSum(name=path.name, bytes=by_name[path.name].bytes, modified=0, xxh3_64=by_name[path.name].xxh3_64)
        for path in files.safetensors
    ]
    return Published(weights=identify(files.config, sums).weights, files=tuple(published))


def _summed(path: Path, advance: Advance) -> PublishedFile:
    sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            xxh3.update(chunk)
            size += len(chunk)
            advance(len(chunk))
    is_weights = path.name.endswith(WEIGHTS)
    return PublishedFile(name=path.name, bytes=size, sha256=sha256.hexdigest(), xxh3_64=xxh3.hexdigest() if is_weights else "")


async def _size(store: ObjectStore, path: str) -> int | None:
    try:
        return await store.size(path)
    except Missing:
        return None


async def _send(store: ObjectStore, path: str, source: Path, file: PublishedFile) -> None:
    """A file that grew or shrank since it was read would be published under a checksum that is not its own."""
    await store.write(path, source)
    if (size := await store.size(path)) != file.bytes:
        raise ModelError(f"{source} changed while it was sent ({size} bytes, {file.bytes} when it was read): push again")
