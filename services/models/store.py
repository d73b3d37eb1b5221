"""The models on this machine: a name or a folder → files ready to load.

Owns `<home>/models/`, reads `<home>/pulled/` (`services.models.place`) as well. Reads only safetensors, JSON and text; files that
could run code when loaded are refused by name.
Invariant: `open` never downloads, and what `ensure` leaves under a model's name is whole, also when a start is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.clock import Clock, SystemClock
from services.models.catalog import CATALOG, Download, KnownModel
from services.models.errors import ModelError
from services.models.lock import exclusive
from services.models.manifest import MANIFEST, Manifest, read_manifest, summarise, write_manifest
from services.models.place import Place
from services.models.progress import Progress
from services.settings.model_path import is_folder, model_path

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXECUTABLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LOCK_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready to load, in Hugging Face layout. `chat_template`: the file that holds it, None when there is none.

    `safetensors`: one file or the shards, sorted by name; empty when opened without weights.
    `weights`: identity of config and weights (`services.models.manifest`).
    """

    name: str
    folder: Path
    config: Path
    tokenizer: Path
    chat_template: Path | None
    safetensors: tuple[Path, ...]
    weights: str


class ModelStore:
    """Models under `home`, and folders of the user's own. `download` replaces pip (offline mirrors, tests)."""

    def __init__(
        self,
        home: Path,
        *,
        catalog: Mapping[str, KnownModel] = CATALOG,
        clock: Clock | None = None,
        download: Download | None = None,
    ) -> None:
        self._home = home
        self._catalog = catalog
        self._clock = clock or SystemClock()
        self._download = download

    def path(self, name: str) -> Path:
        """Where model `name` lies or will lie: `services.settings.model_path`, or where it was pulled to.

        Raises `ModelError` for an empty name.
        """
        if not name:
            raise ModelError("the model's name is empty")
        own = model_path(self._home, name)
        if is_folder(name) or own.is_dir():
            return own
        pulled = Place(self._home, name).current
        return pulled.resolve() if pulled.is_dir() else own

    def ensure(self, name: str, progress: Progress) -> ModelFiles:
        """`open`, after fetching and converting the model if it is one Headrace knows and it is not here yet.

        Raises `ModelError`. Any number of processes may call this at once.
        """
        known = self._catalog.get(name)
        if known is None:
            return self.open(name)
        if (files := self._current(known)) is not None:
            return files
        folder = self._home / "models" / name
        self._make_folder(folder.parent)
        with exclusive(folder.with_name(f".{name}.lock"), self._clock, progress, limit_s=_LOCK_LIMIT_S):
            if (files := self._current(known)) is None:  # another process may have made it while we waited
                self._make(known, folder, progress)
                files = self.open(name)
            return files

    def open(self, name: str, *, weights: bool = True) -> ModelFiles:
        """The files of a model that is here. Without `weights` a folder needs none: engines that play a script.

        Raises `ModelError` for a missing model, an incomplete folder, or weights in a format that could run code.
        """
        folder = self.path(name)
        if not folder.is_dir():
            raise ModelError(f"there is no model {name!r} at {folder}; {self._hint(name)}")
        return self.open_folder(folder, model_path(self._home, name).resolve().name, weights=weights)

    def open_folder(self, folder: Path, name: str, *, weights: bool = True) -> ModelFiles:
        """`open` for a folder that is known to be there, under the name that the model shall have."""
        config, tokenizer = folder / "config.json", folder / "tokenizer.json"
        for needed in (config, tokenizer):
            if not needed.is_file():
                raise ModelError(f"{folder} has no {needed.name}: a model folder in Hugging Face layout has one")
        files = weight_files(folder) if weights else ()
        try:
            identity = self._manifest(folder, config, files).weights
        except OSError as error:
            raise ModelError(f"cannot read the model in {folder}: {error.strerror}") from None
        return ModelFiles(name, folder, config, tokenizer, _chat_template(folder), files, identity)

    def _current(self, known: KnownModel) -> ModelFiles | None:
        """The known model if it is here, whole, and made by this version of the converter."""
        from services.models.fetch import CONVERTER  # imports what only the machine that converts needs

        manifest = read_manifest(self._home / "models" / known.name / MANIFEST)
        if manifest is None or (manifest.source, manifest.converter) != (known.gguf_sha256, CONVERTER):
            return None
        try:
            return self.open(known.name)
        except ModelError:
            return None

    def _make(self, known: KnownModel, folder: Path, progress: Progress) -> None:
        from services.models.fetch import fetch

        for leftover in folder.parent.glob(f".{known.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{known.name}.", suffix=".tmp", dir=folder.parent))
        try:
            made = fetch(known, scratch, progress, self._download)
            if folder.exists():
                folder.rename(scratch / "replaced")
            made.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _manifest(self, folder: Path, config: Path, files: tuple[Path, ...]) -> Manifest:
        """The folder's manifest, or one computed now and kept under `home`: a folder of the user's is never written to."""
        own = read_manifest(folder / MANIFEST)
        if own is not None and own.describes(config, files):
            return own
        digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
        cache = self._home / "manifests" / f"{digest}.json"
        cached = read_manifest(cache)
        if cached is not None and cached.describes(config, files):
            return cached
        manifest = summarise(config, files)
        if own is not None and own.converter and files and own.weights != manifest.weights:
            raise ModelError(f"the model in {folder} is damaged: delete that folder and start again")
        with contextlib.suppress(OSError):  # only a cache: on a read-only disk the sums are taken again next time
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_manifest(manifest, cache)
        return manifest

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"cannot create {folder}: {error.strerror}; set HEADRACE_HOME to a folder of yours") from None

    def _hint(self, name: str) -> str:
        if name in self._catalog:
            return "`headrace models pull` fetches it"
        return f"known models: {', '.join(sorted(self._catalog))}; or give a folder in Hugging Face layout"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The single safetensors file, or all shards the index names. Raises `ModelError`."""
    if (folder / _INDEX).is_file():
        names = _shards(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        refused = sorted(file.name for file in folder.iterdir() if file.suffix in _EXECUTABLE)
        if refused:
            raise ModelError(f"{folder / refused[0]} could run code when loaded; convert the weights to safetensors")
        raise ModelError(f"{folder} has no {_SINGLE}: a model folder in Hugging Face layout has one")
    files = tuple(folder / name for name in names)
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} lacks {file.name}, which its index names; download the model again")
    return files


def _shards(index: Path) -> list[str]:
    """The files an index names: plain names of safetensors files, nothing outside the folder."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}") from None
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}; only safetensors files in the same folder are loaded")
    return names


def _chat_template(folder: Path) -> Path | None:
    """`chat_template.jinja` wins over the template inside `tokenizer_config.json`, as in Hugging Face."""
    if (own := folder / "chat_template.jinja").is_file():
        return own
    config = folder / "tokenizer_config.json"
    try:
        return config if json.loads(config.read_bytes()).get("chat_template") else None
    except (OSError, ValueError, AttributeError):
        return None
