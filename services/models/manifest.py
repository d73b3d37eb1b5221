"""Which weights a folder holds: file sizes and checksums, and the one `weights` identity made from them.

Invariant: equal `weights` means equal config and equal weight bytes; where the folder lies and how its files are dated means
nothing. Checksums are xxh3_64 (against damage, not against malice), the identity is blake2b over config and checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from services.models.errors import ModelError

MANIFEST = "headrace.json"
_CHUNK = 1 << 22


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """One weight file. `modified` is its mtime in nanoseconds: a cheap sign that the checksum is still of this file."""

    name: str
    bytes: int
    modified: int
    xxh3_64: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is the blake2b of the canonical config. `source`: SHA-256 of the file it was converted from, or empty."""

    weights: str
    config: str
    files: tuple[FileSum, ...]
    source: str = ""
    converter: int = 0

    def describes(self, config: Path, files: Sequence[Path]) -> bool:
        """Whether these are still the files that were summed, by name, size and date, and the config by content."""
        if self.config != config_digest(config) or len(self.files) != len(files):
            return False
        return all(
            (known.name, known.bytes, known.modified) == (file.name, stat.st_size, stat.st_mtime_ns)
            for known, file in zip(self.files, files, strict=True)
            for stat in (file.stat(),)
        )


def summarise(config: Path, files: Sequence[Path], *, source: str = "", converter: int = 0) -> Manifest:
    """Reads every byte of `files` once. Raises `ModelError` for an unreadable config, OSError for unreadable files."""
    return identify(config, [_sum(file) for file in files], source=source, converter=converter)


def identify(config: Path, sums: Sequence[FileSum], *, source: str = "", converter: int = 0) -> Manifest:
    """The manifest of files whose checksums are known, in the order in which they are loaded. Raises as `summarise`."""
    digest = config_digest(config)
    identity = hashlib.blake2b(digest.encode(), digest_size=16)
    for item in sums:
        identity.update(f"\n{item.name} {item.bytes} {item.xxh3_64}".encode())
    return Manifest(weights=identity.hexdigest(), config=digest, files=tuple(sums), source=source, converter=converter)


def config_digest(path: Path) -> str:
    """blake2b-128 in hex of the config, its keys sorted: white space and key order mean nothing."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_manifest(path: Path) -> Manifest | None:
    """None when there is none that can be read: it can always be made again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def write_manifest(manifest: Manifest, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def _sum(path: Path) -> FileSum:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        stat = path.stat()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return FileSum(name=path.name, bytes=stat.st_size, modified=stat.st_mtime_ns, xxh3_64=digest.hexdigest())
