"""Models for a person at a terminal: progress bars, and one line for whatever goes wrong."""

from __future__ import annotations

from services.cli.failure import CommandError
from services.models.errors import ModelError
from services.models.progress import Progress, Terminal
from services.models.store import ModelFiles, ModelStore
from services.settings import Settings


def fetch(settings: Settings) -> int:
    """`headrace model fetch`: the exit code. Raises `CommandError`."""
    files = prepare(settings, Terminal(), weights=True)
    print(f"{files.name}: {files.folder}")
    return 0


def prepare(settings: Settings, progress: Progress, *, weights: bool) -> ModelFiles:
    """The model of `settings`, fetched if need be. Without `weights` a tokenizer is enough. Raises `CommandError`."""
    store = ModelStore(settings.home_dir)
    try:
        if not weights and store.path(settings.model).is_dir():
            return store.open(settings.model, weights=False)
        return store.ensure(settings.model, progress)
    except ModelError as error:
        raise CommandError(str(error)) from None
