"""Models for a person at a terminal: progress bars, and one line for whatever goes wrong."""

from __future__ import annotations

from services.cli.failure import CommandError
from services.models.errors import ModelError
from services.models.progress import Progress, Terminal
from services.models.store import ModelFiles, ModelStore
from services.settings import Settings


def fetch(settings: Settings, model: str | None) -> int:
    """`headrace model fetch`, of `model` or of all that are served: the exit code. Raises `CommandError`."""
    for one in settings.served if model is None else (model,):
        files = prepare(settings, one, Terminal(), weights=True)
        print(f"{files.name}: {files.folder}")
    return 0


def prepare(settings: Settings, model: str, progress: Progress, *, weights: bool) -> ModelFiles:
    """A model's files, fetched if need be. Without `weights` a tokenizer is enough. Raises `CommandError`."""
    store = ModelStore(settings.home_dir)
    try:
        if not weights and store.path(model).is_dir():
            return store.open(model, weights=False)
        return store.ensure(model, progress)
    except ModelError as error:
        raise CommandError(str(error)) from None
