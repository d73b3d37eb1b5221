"""The work queue as one process reaches it: over a network that takes time, and sometimes not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import BusUnavailable
from services.bus.memory_queue import MemoryItem, MemoryWorkQueue
from services.bus.work_queue import Put
from tests.simulation.network import Network, State

_GIVE_UP_S = 2.0


class Reached:
    """A `WorkQueue` for one process."""

    def __init__(self, queue: MemoryWorkQueue, network: Network, process: str) -> None:
        self._queue = queue
        self._network = network
        self._process = process

    async def ensure(self) -> None:
        await self.there()

    async def put(self, subject: str, data: bytes, *, msg_id: str, ttl_s: float, headers: Mapping[str, str] | None = None) -> Put:
        await self.there()
        put = await self._queue.put(subject, data, msg_id=msg_id, ttl_s=ttl_s, headers=headers)
        await self.there()
        return put

    async def waiting(self, subject_filter: str) -> dict[str, int]:
        await self.there()
        return await self._queue.waiting(subject_filter)

    async def pull(self, subject_filter: str, durable: str) -> Item | None:
        await self.there()
        item = await self._queue.pull(subject_filter, durable)
        await self.there()
        return Item(self, item) if item is not None else None

    async def purge(self, subject: str) -> bool:
        await self.there()
        purged = await self._queue.purge(subject)
        await self.there()
        return purged

    async def there(self) -> None:
        """One way. Raises `BusUnavailable`, at once or after the time-out of a call that nobody answers."""
        link = self._network.link(self._process)
        if not link.bus.connected:
            raise BusUnavailable("the connection is down")
        if link.state is not State.OPEN or self._queue.down:
            await asyncio.sleep(_GIVE_UP_S)
            raise BusUnavailable("no answer")
        await asyncio.sleep(self._network.latency())


@dataclass(frozen=True, slots=True)
class Item:
    """An `Item`."""

    _reached: Reached
    _item: MemoryItem

    @property
    def subject(self) -> str:
        return self._item.subject

    @property
    def data(self) -> bytes:
        return self._item.data

    @property
    def headers(self) -> Mapping[str, str]:
        return self._item.headers

    async def ack(self) -> None:
        await self._reached.there()
        await self._item.ack()

    async def nak(self) -> None:
        await self._reached.there()
        await self._item.nak()
