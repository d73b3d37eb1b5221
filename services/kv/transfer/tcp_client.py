"""Fetches offered KV blocks over TCP, straight into pool memory.

Owns: one connection a fetch, and the lease while it lives. Must not know: whose memory it fills. Invariant: when `fetch` raised
or `release` or `close` ended, the connection is closed and nothing more is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import xxhash

from schemas.errors import UnreadableMessage
from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Fetch, FetchAnswer, Keep, Released
from services.kv.transfer.interface import DEFAULT_LIMITS, ConnectionLost, CorruptBlock, FetchDenied, FetchTimeout, TransferLimits
from services.kv.transfer.wire import CHECKSUM_BYTES, receive_frame, receive_into, send_frame, split_address, tune


class TcpFetched:
    """A `Fetched`."""

    def __init__(self, sock: socket.socket, limits: TransferLimits) -> None:
        self._sock = sock
        self._limits = limits
        self._keeping = asyncio.create_task(self._keep())

    async def release(self) -> bool:
        """Once; a second call says False."""
        try:
            async with asyncio.timeout(self._limits.release_s):
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
                await asyncio.sleep(self._limits.renew_s)
                async with asyncio.timeout(self._limits.lease_s):
                    await send_frame(self._sock, Keep())

    async def _stop_keeping(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)


class TcpTransferClient:
    """A `TransferClient`. A host name in a ticket is resolved to IPv4; an IPv6 address stands in brackets."""

    def __init__(self, limits: TransferLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits

    async def fetch(
        self,
        ticket: Ticket,
        blocks: Sequence[BlockRef],
        into: Sequence[memoryview],
        *,
        kv_compat: str,
        timeout: float,
    ) -> TcpFetched:
        if len(blocks) != len(into):
            raise ValueError(f"{len(blocks)} blocks for {len(into)} views")
        wanted = tuple((block.slot, block.generation) for block in blocks)
        try:
            async with asyncio.timeout(timeout):
                return await self._fetch(ticket.address, Fetch(token=ticket.token, kv_compat=kv_compat, blocks=wanted), into)
        except TimeoutError:
            raise FetchTimeout(f"no KV blocks within {timeout} s") from None
        except (OSError, UnreadableMessage) as error:
            raise ConnectionLost(f"KV transfer ended early: {type(error).__name__}") from error

    async def _fetch(self, address: str, request: Fetch, into: Sequence[memoryview]) -> TcpFetched:
        async with contextlib.AsyncExitStack() as on_failure:
            sock = await _connect(address)
            on_failure.callback(sock.close)
            await send_frame(sock, request)
            answer = await receive_frame(sock, FetchAnswer)
            if answer.refused is not None:
                raise FetchDenied(answer.refused)
            fetched = TcpFetched(sock, self._limits)
            on_failure.push_async_callback(fetched.close)
            for view in into:
                await _receive_block(sock, view, answer.block_bytes)
            on_failure.pop_all()
        return fetched


async def _connect(address: str) -> socket.socket:
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise UnreadableMessage(str(error)) from None
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _receive_block(sock: socket.socket, view: memoryview, block_bytes: int) -> None:
    if view.nbytes != block_bytes:
        raise CorruptBlock(f"a block is {block_bytes} bytes there and {view.nbytes} here")
    checksum = bytearray(CHECKSUM_BYTES)
    await receive_into(sock, memoryview(checksum))
    await receive_into(sock, view.cast("B"))
    if xxhash.xxh3_64_intdigest(view) != int.from_bytes(checksum, "little"):
        raise CorruptBlock("a KV block changed between its checksum and its arrival")
    await asyncio.sleep(0)  # a sender as fast as we are must not keep the loop from others
