"""The transfer protocol within one process: for simulations and tests, by the same book of offers, with no socket.

Owns: a registry of servers by address, which its maker passes to both sides. Invariant: as for TCP; only the carrier differs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import xxhash

from schemas.handoff import BlockRef, Ticket
from services.clock import Clock
from services.kv.holders import Holder
from services.kv.pool import BlockPool
from services.kv.transfer.interface import DEFAULT_LIMITS, ConnectionLost, CorruptBlock, FetchTimeout, OnDone, TransferLimits
from services.kv.transfer.offers import Offer, OfferBook


class MemoryTransferServer:
    """A `TransferServer` that listens in `network` under `address`."""

    def __init__(
        self,
        pool: BlockPool,
        network: dict[str, MemoryTransferServer],
        address: str,
        *,
        clock: Clock,
        limits: TransferLimits = DEFAULT_LIMITS,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.counts: dict[str, int] = {}
        self.pool = pool
        self.book = OfferBook(pool, clock, limits, random_bytes, lambda offer: None, self.counts)
        self._limits = limits
        self._network = network
        self._address = address
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._network[self._address] = self
        self._watching = asyncio.create_task(self.book.watch())

    @property
    def address(self) -> str:
        return self._address

    def offer(self, holder: Holder, *, kv_compat: str, on_done: OnDone) -> Ticket:
        offer = self.book.open(holder, kv_compat, on_done)
        return Ticket(address=self._address, token=offer.token, expires_s=self._limits.present_s)

    def revoke(self, holder: Holder) -> bool:
        return self.book.revoke(holder)

    async def close(self) -> None:
        self._network.pop(self._address, None)
        self.book.lose_all()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


class MemoryFetched:
    """A `Fetched`."""

    def __init__(self, book: OfferBook, offer: Offer, limits: TransferLimits) -> None:
        self._book = book
        self._offer = offer
        self._keeping = asyncio.create_task(self._keep(limits.renew_s))

    async def release(self) -> bool:
        ok = self._book.release(self._offer)
        await self.close()
        return ok

    async def close(self) -> None:
        self._book.lose(self._offer)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _keep(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self._book.renew(self._offer)


class MemoryTransferClient:
    """A `TransferClient` of `network`. Each block takes `block_s` seconds."""

    def __init__(
        self, network: dict[str, MemoryTransferServer], *, limits: TransferLimits = DEFAULT_LIMITS, block_s: float = 0.0
    ) -> None:
        self._network = network
        self._limits = limits
        self._block_s = block_s

    async def fetch(
        self, ticket: Ticket, blocks: Sequence[BlockRef], into: Sequence[memoryview], *, kv_compat: str, timeout: float
    ) -> MemoryFetched:
        server = self._network.get(ticket.address)
        if server is None:
            raise ConnectionLost("nobody listens there")
        offer = server.book.present(ticket.token, kv_compat, [(block.slot, block.generation) for block in blocks])
        fetched = MemoryFetched(server.book, offer, self._limits)
        try:
            async with asyncio.timeout(timeout):
                await server.pool.stage_out([block.slot for block in blocks])
                for block, view in zip(blocks, into, strict=True):
                    await asyncio.sleep(self._block_s)
                    _copy(server, offer, block.slot, view)
        except TimeoutError:
            await fetched.close()
            raise FetchTimeout(f"no KV blocks within {timeout} s") from None
        except BaseException:
            await fetched.close()
            raise
        return fetched


def _copy(server: MemoryTransferServer, offer: Offer, slot: int, view: memoryview) -> None:
    if not server.book.is_open(offer):
        raise ConnectionLost("the offer ended while its blocks were on their way")
    if view.nbytes != server.pool.block_bytes:
        raise CorruptBlock(f"a block is {server.pool.block_bytes} bytes there and {view.nbytes} here")
    checksum = server.pool.checksum(slot)
    view[:] = server.pool.view(slot)
    if xxhash.xxh3_64_intdigest(view) != checksum:
        raise CorruptBlock("a KV block changed after its checksum was taken")
