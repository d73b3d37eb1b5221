"""Tells routers what this worker's prefix cache holds: each change in numbered batches, and all of it, page by page, to who asks.

Owns: the numbers. Must not know: who listens, what for. Invariant: the union of all pages, with every batch after the smallest
`at` among them applied in order, is what the cache held at the last batch. So a receiver that misses a number, or begins, asks
for the pages and needs nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from schemas.errors import BusError
from schemas.kvevents import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.subjects import Subjects
from services.bus.interface import Bus, Msg
from services.bus.typed import Refusals, answer, listen, send
from services.kv.ledger import BlockLedger
from services.kv.prefix import CacheEvents

DEBOUNCE_S = 0.02
IDLE_S = 1.0
"""A batch is sent this often, changes or not: a receiver that lost the last one knows it by then."""
BATCH = 2048
"""Most identities of a kind in one message: 18 bytes each."""


class KvEventFeed:
    """`page`: blocks a page of the snapshot covers. What moves to another page later is stored anew, which a batch says."""

    def __init__(self, bus: Bus, subjects: Subjects, pool: BlockLedger, *, page: int = 2 * BATCH) -> None:
        self._bus = bus
        self._subjects = subjects
        self._pool = pool
        self._page = page
        self._number = 0
        self._changed = asyncio.Event()
        pool.prefix.on_change(self._changed.set)

    async def listen(self, refusals: Refusals) -> None:
        """Answer who asks for pages."""
        subject = self._subjects.kv_snapshot(self._bus.process)
        await listen(self._bus, subject, KvSnapshotRequest, self._on_request, refusals=refusals)

    async def run(self) -> None:
        """For as long as the worker lives."""
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._changed.wait()
            except TimeoutError:
                self.say()
                continue
            await asyncio.sleep(DEBOUNCE_S)
            self.say()

    def say(self) -> None:
        """What changed since the last batch, now. While the bus is down changes wait."""
        if not self._bus.connected:
            return
        self._changed.clear()
        subject = self._subjects.kv_events(self._bus.process)
        for stored, removed in _batches(self._pool.prefix.drain_events()):
            self._number += 1
            batch = KvEvents(process=self._bus.process, first=self._number, stored=stored, removed=removed)
            try:
                send(self._bus, subject, batch)
            except BusError:
                continue  # the gap in the numbers says so

    def _on_request(self, request: KvSnapshotRequest, msg: Msg) -> None:
        self.say()  # so that the page is what all batches up to `at` make
        blocks = range(request.page * self._page, min((request.page + 1) * self._page, self._pool.total))
        snapshot = KvSnapshot(
            process=self._bus.process,
            at=self._number,
            page=request.page,
            pages=max(1, -(-self._pool.total // self._page)),
            hashes=tuple(self._pool.prefix.identities(blocks)),
        )
        answer(self._bus, msg, snapshot)


def _batches(events: CacheEvents) -> Iterator[tuple[tuple[bytes, ...], tuple[bytes, ...]]]:
    """At least one, which may be empty. No identity is in both parts, so they can be cut anywhere."""
    for start in range(0, max(len(events.stored), len(events.removed), 1), BATCH):
        yield events.stored[start : start + BATCH], events.removed[start : start + BATCH]
