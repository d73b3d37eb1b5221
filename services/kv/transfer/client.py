"""Fetches offered KV blocks over a socket, into views that the caller owns.

Owns: one connection a fetch. Must not know: whose blocks these are, how a carrier moves them. Invariant: once `fetch` has
returned or raised, no byte of the caller's views is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from schemas.errors import UnreadableMessage
from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Fetch, FetchAnswer, Keep, Released
from services.kv.transfer.interface import DEFAULT_LIMITS, ConnectionLost, CorruptBlock, FetchDenied, FetchTimeout, TransferLimits
from services.kv.transfer.patience import within
from services.kv.transfer.reader import Reader, Unreachable
from services.kv.transfer.wire import receive_frame, send_frame

_log = logging.getLogger(__name__)


class SocketFetched:
    """A `Fetched`."""

    def __init__(self, sock: socket.socket, limits: TransferLimits) -> None:
        self._sock = sock
        self._limits = limits
        self._keeping: asyncio.Task[None] | None = None  # most fetches are over before there is anything to renew
        self._due = asyncio.get_running_loop().call_later(limits.renew_s, self._begin_keeping)

    async def release(self) -> bool:
        """Once; a second call says False."""
        try:
            async with within(self._limits.release_s):
                await self._stop_keeping()  # what came after our last word would be answered by a reset, and lose the answer
                await send_frame(self._sock, Keep(done=True))
                return (await receive_frame(self._sock, Released)).ok
        except (OSError, UnreadableMessage):  # TimeoutError too: without an answer the blocks are not ours
            return False
        finally:
            await self.close()

    async def close(self) -> None:
        try:
            await self._stop_keeping()
        finally:
            self._sock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _keep(self) -> None:
        with contextlib.suppress(OSError):  # whoever reads next finds the connection ended
            while True:
                async with asyncio.timeout(self._limits.lease_s):
                    await send_frame(self._sock, Keep())
                await asyncio.sleep(self._limits.renew_s)

    def _begin_keeping(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    async def _stop_keeping(self) -> None:
        self._due.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)


class SocketTransferClient:
    """A `TransferClient`: the first of `readers` that reaches the owner of a ticket fetches. `counts` fetches by carrier."""

    def __init__(self, readers: Sequence[Reader], limits: TransferLimits = DEFAULT_LIMITS) -> None:
        self.counts: dict[str, int] = {}
        self._readers = readers
        self._limits = limits

    async def fetch(
        self,
        ticket: Ticket,
        blocks: Sequence[BlockRef],
        into: Sequence[memoryview],
        *,
        kv_compat: str,
        timeout: float,
    ) -> SocketFetched:
        if len(blocks) != len(into):
            raise ValueError(f"{len(blocks)} blocks for {len(into)} views")
        try:
            async with within(timeout):
                reader, sock = await self._open(ticket)
                return await self._fetch(reader, sock, ticket, blocks, [view.cast("B") for view in into], kv_compat)
        except TimeoutError:
            raise FetchTimeout(f"no KV blocks within {timeout} s, or none for {self._limits.lease_s} s") from None
        except (OSError, UnreadableMessage) as error:
            raise ConnectionLost(f"KV transfer ended early: {type(error).__name__}") from error

    def close(self) -> None:
        """No fetch may be running."""
        for reader in self._readers:
            reader.close()

    async def _open(self, ticket: Ticket) -> tuple[Reader, socket.socket]:
        for reader in self._readers:
            try:
                return reader, await reader.open(ticket)
            except Unreachable as error:
                _log.debug("KV transfer: no %s: %s", reader.carrier, error)
        raise Unreachable("no carrier leads to the owner")

    async def _fetch(
        self,
        reader: Reader,
        sock: socket.socket,
        ticket: Ticket,
        blocks: Sequence[BlockRef],
        into: Sequence[memoryview],
        kv_compat: str,
    ) -> SocketFetched:
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.callback(sock.close)
            wanted = tuple((block.slot, block.generation) for block in blocks)
            await send_frame(sock, Fetch(token=ticket.token, kv_compat=kv_compat, blocks=wanted, carrier=reader.carrier))
            answer = await receive_frame(sock, FetchAnswer, silent_s=self._limits.lease_s)
            if answer.refused is not None:
                raise FetchDenied(answer.refused)
            fetched = SocketFetched(sock, self._limits)
            on_failure.push_async_callback(fetched.close)
            for view in into:
                if view.nbytes != answer.block_bytes:
                    raise CorruptBlock(f"a block is {answer.block_bytes} bytes there and {view.nbytes} here")
            await reader.receive(sock, ticket, answer.block_bytes, blocks, into)
            on_failure.pop_all()
        self.counts[reader.carrier] = self.counts.get(reader.carrier, 0) + 1
        return fetched
