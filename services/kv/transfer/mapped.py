"""Blocks copied out of the owner's memory, which is mapped here: two processes of one host and user.

Owns: the mappings of other processes' pools. Must not know: engines. Invariant: a copy counts only when it has the checksum that
the owner took; the mapping itself may change at any time. A copy runs on the event loop, in slices of under a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

import xxhash

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Attach, Attached, Carrier
from services.kv.memory import map_shared
from services.kv.transfer import local
from services.kv.transfer.attachments import Attachments
from services.kv.transfer.checksums import ChecksumReader
from services.kv.transfer.interface import CorruptBlock
from services.kv.transfer.reader import Unreachable, refusal
from services.kv.transfer.wire import receive_frame, send_frame

SLICE_BYTES = 1 << 20


class MappedReader:
    """A `Reader` of tickets that name a local socket."""

    carrier = Carrier.MAPPED

    def __init__(self) -> None:
        self._memories: Attachments[memoryview] = Attachments()

    async def open(self, ticket: Ticket) -> socket.socket:
        try:
            await self._memory(ticket)
            return await local.connect(ticket.local)
        except OSError as error:
            raise Unreachable(str(error)) from error

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        memory = await self._memory(ticket)
        checksums = ChecksumReader(sock)
        for block, view in zip(blocks, into, strict=True):
            source = memory[block.slot * block_bytes : (block.slot + 1) * block_bytes]
            if source.nbytes != block_bytes:
                raise CorruptBlock(f"block {block.slot} lies outside the memory that was passed")
            if await copy(source, view) != await checksums.next():
                raise CorruptBlock("a KV block changed between its checksum and its copy")

    def close(self) -> None:
        self._memories.close()

    async def _memory(self, ticket: Ticket) -> memoryview:
        return await self._memories.get(ticket.local, lambda: _attach(ticket))


async def copy(source: memoryview, view: memoryview) -> int:
    """Copy byte views of one size; the xxh3_64 of what arrived."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), SLICE_BYTES):
        part = view[start : start + SLICE_BYTES]
        part[:] = source[start : start + SLICE_BYTES]
        digest.update(part)
        await asyncio.sleep(0)
    return digest.intdigest()


async def _attach(ticket: Ticket) -> tuple[socket.socket, memoryview]:
    sock = await local.connect(ticket.local)
    try:
        await send_frame(sock, Attach(token=ticket.token, carrier=Carrier.MAPPED))
        attached = await receive_frame(sock, Attached)
        if attached.refused is not None:
            raise refusal(attached.refused)
        fd = await local.receive_descriptor(sock)
        try:
            return sock, map_shared(fd, attached.size)
        finally:
            os.close(fd)
    except BaseException:
        sock.close()
        raise
