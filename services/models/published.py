"""What a published model consists of: the manifest that lies beside its objects in a store.

Owns the format and every check of it; knows no store. A manifest is written last and read first: `<model>/manifest.json` names
objects `<model>/<sha256>/<file>`, which never change, so whoever reads one manifest reads one model, whatever is pushed
meanwhile. Invariant: no name in a manifest that was read can lead out of a folder, or be of a kind that runs when loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from services.models.errors import ModelError

MANIFEST_OBJECT = "manifest.json"
MAX_MANIFEST_BYTES = 4 * 2**20
WEIGHTS = ".safetensors"
LOADABLE = (WEIGHTS, ".json", ".jinja", ".txt", ".model")
"""Endings of what a model may consist of: tensors, JSON, templates, vocabularies. Nothing of it runs when it is loaded."""
NEEDED = ("config.json", "tokenizer.json")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `sha256` in hex is also its address. `xxh3_64`, of weights only: what their identity is made from, so that nobody
    has to read them once more for it."""

    name: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    xxh3_64: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""

    @property
    def is_weights(self) -> bool:
        return self.name.endswith(WEIGHTS)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a store. `weights`: identity of config and weights (`services.models.manifest`)."""

    format: Literal[1] = 1
    weights: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    files: Annotated[tuple[PublishedFile, ...], msgspec.Meta(max_length=10_000)]

    @property
    def revision(self) -> str:
        """16 hex digits that change with any file: the name of the folder it is fetched into."""
        digest = hashlib.sha256()
        for file in sorted(self.files, key=lambda file: file.name):
            digest.update(f"{file.name} {file.sha256}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def wanted(self, *, weights: bool) -> tuple[PublishedFile, ...]:
        """What a process needs: without `weights`, what turns text into tokens and back. Small files come first."""
        chosen = (file for file in self.files if weights or not file.is_weights)
        return tuple(sorted(chosen, key=lambda file: (file.is_weights, file.name)))


def manifest_object(model: str) -> str:
    return f"{checked_model(model)}/{MANIFEST_OBJECT}"


def file_object(model: str, file: PublishedFile) -> str:
    return f"{checked_model(model)}/{file.sha256}/{file.name}"


def checked_model(name: str) -> str:
    """`name`, if it can be one segment of a path everywhere. Raises `ModelError`."""
    if not _MODEL.fullmatch(name):
        raise ModelError(f"{name!r} cannot be the name of a model in a store: letters, digits, '.', '_' and '-' only")
    return name


def encode(published: Published) -> bytes:
    return msgspec.json.format(msgspec.json.encode(published)) + b"\n"


def decode(data: bytes, where: str) -> Published:
    """Raises `ModelError` that begins with `where` for anything that is not a manifest we would have written."""
    try:
        published = msgspec.json.decode(data, type=Published)
    except msgspec.DecodeError as error:
        raise ModelError(f"{where} is not a manifest of this version of Headrace: {error}") from None
    if reason := wrong_names(file.name for file in published.files):
        raise ModelError(f"{where} {reason}: refused")
    return published


def wrong_names(names: Iterable[str]) -> str:
    """Why these cannot be the files of a model, "" when they can."""
    seen: set[str] = set()
    for name in names:
        if not _FILE.fullmatch(name) or Path(name).name != name:
            return f"names {name!r}, which is not a plain file name"
        if not name.endswith(LOADABLE):
            return f"names {name!r}; only {', '.join(LOADABLE)} are loaded"
        if name.casefold() in seen:
            return f"names {name!r} twice"
        seen.add(name.casefold())
    lacking = [name for name in NEEDED if name not in seen]
    return f"has no {lacking[0]}" if lacking else ""
