"""Which files of a published model are in a folder, whole.

Owns the local manifest of such a folder: weights are read once, when they are fetched; later their size and date are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from services.models.errors import ModelError
from services.models.manifest import MANIFEST, FileSum, identify, read_manifest, write_manifest
from services.models.partial import sha256_of
from services.models.published import Published, PublishedFile
from services.models.store import weight_files


def lacking(folder: Path, wanted: Iterable[PublishedFile], *, read_weights: bool) -> list[PublishedFile]:
    """The files of `wanted` that are not in `folder` as they should be. With `read_weights` those are looked into whose date the
    local manifest does not know; without, they count as lacking."""
    known = read_manifest(folder / MANIFEST)
    dated = set() if known is None else {(file.name, file.bytes, file.modified) for file in known.files}

    def is_here(file: PublishedFile) -> bool:
        path = folder / file.name
        try:
            stat = path.stat()
            if stat.st_size != file.bytes:
                return False
            if file.is_weights and ((file.name, stat.st_size, stat.st_mtime_ns) in dated or not read_weights):
                return (file.name, stat.st_size, stat.st_mtime_ns) in dated
            return sha256_of(path) == file.sha256
        except OSError:
            return False

    return [file for file in wanted if not is_here(file)]


def write_local_manifest(folder: Path, published: Published) -> None:
    """So that `ModelStore.open` knows the weights' identity without reading them; they are known to be whole.

    Raises `ModelError` when the checksums in the manifest do not give the identity in it, OSError.
    """
    sums = {file.name: file.xxh3_64 for file in published.files}
    config = folder / "config.json"
    manifest = identify(
        config,
        [
            FileSum(name=file.name, bytes=stat.st_size, modified=stat.st_mtime_ns, xxh3_64=sums.get(file.name, ""))
            for file in weight_files(folder)
            for stat in (file.stat(),)
        ],
    )
    if manifest.weights != published.weights:
        raise ModelError(f"the manifest of {folder.parent.name} contradicts itself: push that model again")
    scratch = folder / f".{MANIFEST}"
    write_manifest(manifest, scratch)
    scratch.replace(folder / MANIFEST)
