"""A model that the settings name, ready to load: from the store when there is one, else from this machine.

Called once, when a process starts, never for a request. A store that cannot be reached does not stop a machine that has the model
whole: it starts with what was pulled last, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import TypeVar

from services.clock import Clock
from services.models.bucket import ObjectStore, open_bucket
from services.models.errors import Forbidden, ModelError, Trouble
from services.models.partial import in_thread
from services.models.patience import PatientStore
from services.models.progress import Progress
from services.models.pull import Pull, read_published
from services.models.store import ModelFiles, ModelStore
from services.settings.model_path import is_folder
from services.settings.settings import Settings

T = TypeVar("T")


def open_store(settings: Settings, clock: Clock, random: Random, progress: Progress) -> ObjectStore:
    """The store of `settings`, whose trouble is put up with for a while. Raises `ModelError`."""
    return PatientStore(open_bucket(settings.store), settings.store.retry_s, clock, random, progress.warn)


def is_pulled(settings: Settings, model: str) -> bool:
    """Whether `model` comes from a store; one that is given as a folder never does."""
    return bool(settings.store.url) and not is_folder(model)


async def obtain(
    settings: Settings, model: str, progress: Progress, clock: Clock, random: Random, *, weights: bool
) -> ModelFiles:
    """Without `weights` only what turns text into tokens is fetched. Raises `ModelError`: why there is no model."""
    local = ModelStore(settings.home_dir, clock=clock)
    if not is_pulled(settings, model):
        return await in_thread(local.open, model, weights=weights)
    store = open_store(settings, clock, random, progress)
    try:
        published = await read_published(store, model)
    except (Trouble, Forbidden) as error:
        return await in_thread(_pulled_last, local, model, weights, error, progress)
    limits = settings.store
    pull = Pull(store, model, settings.home_dir, clock, progress, limits.deadline_s, limits.parallel)
    folder = await pull.run(published, weights=weights)
    return await in_thread(local.open_folder, folder, model, weights=weights)


def _pulled_last(local: ModelStore, model: str, weights: bool, error: ModelError, progress: Progress) -> ModelFiles:
    try:
        files = local.open(model, weights=weights)
    except ModelError:
        raise error from None
    progress.warn(f"{error}; going on with the {model} that is on this machine, which may be an older one")
    return files


async def unless_stopped(stop: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """What `work` gives, None when `stop` was set first: then it is cancelled. Raises what it raises."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)
