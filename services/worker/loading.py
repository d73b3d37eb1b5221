"""What a worker says while its model is on its way, into its engine too: that it is not ready, how far it is, what is wrong.

It is no worker yet: it beats nothing, so no router knows it. Only its `status` verb answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from services.bus.interface import Msg
from services.bus.micro import Service
from services.models.progress import Logged

_DRAIN_S = 1.0


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """`for_s`: seconds for which it has been doing that. `done` and `total` in bytes, 0 where nobody knows. `trouble`: what was
    wrong last, "" when things move."""

    model: str
    doing: str
    for_s: float
    done: int
    total: int
    trouble: str


class LoadingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves answers with its state instead (`services.worker.status`)."""

    loading: Loading


@asynccontextmanager
async def answering(service: Service, subject: str, model: str, progress: Logged) -> AsyncIterator[None]:
    """Answers on `subject` what `progress` shows, for as long as the worker cannot serve. Raises `Disconnected`."""

    async def say_status(_: Msg) -> LoadingStatus:
        at = Loading(
            model=model,
            doing=progress.doing or "looking for the model",
            for_s=round(progress.for_s, 1),
            done=progress.done,
            total=progress.total,
            trouble=progress.trouble,
        )
        return LoadingStatus(loading=at)

    service.endpoint("status", subject, say_status)
    await service.start()
    try:
        yield
    finally:
        await service.drain(_DRAIN_S)
