"""What a worker says while its model is on its way: that it is not ready, how far it is, and what is wrong.

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
    """`done` and `total` in bytes. `trouble`: what was wrong last, "" when things move."""

    model: str
    doing: str
    done: int
    total: int
    trouble: str


class LoadingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves answers with its state instead (`services.worker.status`)."""

    loading: Loading


@asynccontextmanager
async def answering(service: Service, subject: str, model: str, progress: Logged) -> AsyncIterator[None]:
    """Answers on `subject` what `progress` shows, for as long as the model is obtained. Raises `Disconnected`."""

    async def say_status(_: Msg) -> LoadingStatus:
        doing, done, total = progress.doing or "looking for the model", progress.done, progress.total
        return LoadingStatus(loading=Loading(model=model, doing=doing, done=done, total=total, trouble=progress.trouble))

    service.endpoint("status", subject, say_status)
    await service.start()
    try:
        yield
    finally:
        await service.drain(_DRAIN_S)
