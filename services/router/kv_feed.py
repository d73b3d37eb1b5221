"""Keeps the prefix index true to what workers say of their caches, by numbered events, and by snapshots where those do not do.

Owns: the numbers heard of each process. Must not know: placement. Invariant: after the last batch of a process was applied, the
index holds what its cache held then; a missing number, or a removal of what we never had, ends in a new snapshot. While one is
being read, batches wait, and what is missing costs time only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import BusError, UnreadableMessage
from schemas.kvevents import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.subjects import Subjects
from services.bus.interface import Bus, Msg
from services.bus.typed import ask
from services.router.prefix_index import PrefixIndex
from services.telemetry.logs import fields

PAGE_S = 1.0
AGAIN_S = 0.5
"""After a snapshot that failed batches are ignored for so long."""
AT_ONCE = 8
"""Snapshots read at the same time: a router that starts must not have all workers answer it in one moment."""
MAX_WAITING = 256
"""Batches that wait for a snapshot; more say that it takes too long, and it is begun anew."""
_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


@dataclass(slots=True)
class _Source:
    """`heard`: number of the last batch applied. `waiting`: batches that came while a snapshot is read, None = none is."""

    heard: int = 0
    waiting: list[KvEvents] | None = field(default=None)


class KvFeed:
    """`spawn` runs a task for as long as the router lives."""

    def __init__(self, bus: Bus, subjects: Subjects, index: PrefixIndex, spawn: Spawn) -> None:
        self._bus = bus
        self._subjects = subjects
        self._index = index
        self._spawn = spawn
        self._sources: dict[str, _Source] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)

    @property
    def processes(self) -> set[str]:
        return set(self._sources)

    def on_events(self, batch: KvEvents, _: Msg) -> None:
        source = self._sources.get(batch.process)
        if source is None:
            source = self._sources[batch.process] = _Source()
            if batch.first > 1:
                self._heal(batch.process, source)
        if source.waiting is not None:
            source.waiting.append(batch)
        elif batch.first == source.heard + 1:
            self._apply(batch, source)
        elif batch.first > source.heard:
            self._heal(batch.process, source)

    def forget(self, process: str) -> None:
        """It is gone."""
        self._sources.pop(process, None)
        self._index.forget(process)

    def _apply(self, batch: KvEvents, source: _Source) -> None:
        self._index.stored(batch.process, batch.stored)
        unknown = self._index.removed(batch.process, batch.removed)
        source.heard = batch.first
        if unknown:
            self._heal(batch.process, source)

    def _heal(self, process: str, source: _Source) -> None:
        source.waiting = []
        self._spawn(self._read(process, source), f"snapshot of {process}")

    async def _read(self, process: str, source: _Source) -> None:
        """Make the index agree. If that fails, the next batch of a process that still lives begins it anew."""
        async with self._turn:
            if await self._snapshot(process, source):
                return
        await asyncio.sleep(AGAIN_S)
        if self._sources.get(process) is source:
            self.forget(process)

    async def _snapshot(self, process: str, source: _Source) -> bool:
        """True when all pages were read and every batch after the oldest of them."""
        source.waiting, oldest, page, pages = [], None, 0, 1
        self._index.forget(process)
        while page < pages:
            snapshot = await self._page(process, page)
            if snapshot is None or source.waiting is None or len(source.waiting) > MAX_WAITING:
                return False
            if self._sources.get(process) is not source:
                return True
            self._index.stored(process, snapshot.hashes)
            oldest = snapshot.at if oldest is None else min(oldest, snapshot.at)
            page, pages = page + 1, snapshot.pages
        source.heard, late = oldest or 0, source.waiting
        for batch in late:
            if batch.first == source.heard + 1:
                self._index.stored(process, batch.stored)
                self._index.removed(process, batch.removed)  # it may be older than the page that had it no more
                source.heard = batch.first
            elif batch.first > source.heard:
                return False
        source.waiting = None
        return True

    async def _page(self, process: str, page: int) -> KvSnapshot | None:
        request = KvSnapshotRequest(page=page)
        with suppress(BusError, UnreadableMessage):
            answer: KvSnapshot = await ask(self._bus, self._subjects.kv_snapshot(process), request, KvSnapshot, timeout=PAGE_S)
            return answer
        _log.info("no snapshot of a prefix cache", extra=fields(worker=process, page=page))
        return None
