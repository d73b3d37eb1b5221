"""Blocks as bytes on the connection itself, straight out of pool memory and into it. Works between any two hosts.

Invariant: the sender looks at the offer before each block; the reader verifies each block before it reads the next.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import xxhash

from schemas.errors import UnreadableMessage
from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Carrier
from services.kv.pool import BlockPool
from services.kv.transfer.interface import SILENT_S, CorruptBlock
from services.kv.transfer.wire import CHECKSUM_BYTES, receive_into, split_address, tune


async def send_blocks(sock: socket.socket, pool: BlockPool, slots: Sequence[int], check_open: Callable[[], None]) -> None:
    """Each block, after its checksum. `check_open` raises when they may not be read any more."""
    loop = asyncio.get_running_loop()
    for slot in slots:
        check_open()
        await loop.sock_sendall(sock, pool.checksum(slot).to_bytes(CHECKSUM_BYTES, "little"))
        await loop.sock_sendall(sock, pool.view(slot))
        await asyncio.sleep(0)  # a peer that reads as fast as we send must not keep the loop from others


class StreamReader:
    """A `Reader`. A host name in a ticket is resolved to IPv4; an IPv6 address stands in brackets."""

    carrier = Carrier.STREAM

    async def open(self, ticket: Ticket) -> socket.socket:
        return await connect_tcp(ticket.address)

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        checksum = bytearray(CHECKSUM_BYTES)
        for view in into:
            await receive_into(sock, memoryview(checksum), silent_s=SILENT_S)
            await receive_into(sock, view, silent_s=SILENT_S)
            if xxhash.xxh3_64_intdigest(view) != int.from_bytes(checksum, "little"):
                raise CorruptBlock("a KV block changed between its checksum and its arrival")
            await asyncio.sleep(0)  # a sender as fast as we are must not keep the loop from others

    def close(self) -> None:
        """Nothing is kept."""


async def connect_tcp(address: str) -> socket.socket:
    """Raises OSError, UnreadableMessage: not an address."""
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
