"""Blocks copied out of the owner's memory, which is mapped here: two processes of one host and user.

Owns: the mappings of other processes' pools. Must not know: engines. Invariant: a copy counts only when it has the checksum that
the owner took; the mapping itself may change at any time. A copy runs on the event loop, in turns of about half a millisecond.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import xxhash

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Attach, Attached, Carrier
from services.kv.memory import map_shared
from services.kv.transfer import local
from services.kv.transfer.attachments import Attachments
from services.kv.transfer.checksums import receive_checksums
from services.kv.transfer.interface import CorruptBlock
from services.kv.transfer.pace import Pace
from services.kv.transfer.reader import Unreachable, refusal
from services.kv.transfer.wire import receive_frame, send_frame

_SLICE_BYTES = 1 << 20


class MappedReader:
    """A `Reader` of tickets that name a local socket."""

    carrier = Carrier.MAPPED

    def __init__(self) -> None:
        self._memories: Attachments[memoryview] = Attachments()

    async def open(self, ticket: Ticket) -> socket.socket:
        try:
            await self.memory(ticket)
            return await local.connect(ticket.local)
        except OSError as error:
            raise Unreachable(str(error)) from error

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        memory = await self.memory(ticket)
        pace = Pace()
        copied = []
        for block, view in zip(blocks, into, strict=True):
            source = memory[block.slot * block_bytes : (block.slot + 1) * block_bytes]
            if source.nbytes != block_bytes:
                raise CorruptBlock(f"block {block.slot} lies outside the memory that was passed")
            copied.append(await _copy(source, view, pace))
        if copied != await receive_checksums(sock, len(blocks)):
            raise CorruptBlock("a KV block changed between its checksum and its copy")

    @property
    def attached(self) -> int:
        """How many processes' memory is mapped."""
        return len(self._memories)

    def close(self) -> None:
        self._memories.close()

    async def memory(self, ticket: Ticket) -> memoryview:
        """The whole memory of the ticket's owner, read-only. Raises FetchDenied, OSError, UnreadableMessage."""
        return await self._memories.get(ticket.local, lambda: _attach(ticket))


async def _copy(source: memoryview, view: memoryview, pace: Pace) -> int:
    """Copy byte views of one size; the xxh3_64 of what arrived, taken while it is in the CPU's caches."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), _SLICE_BYTES):
        part = view[start : start + _SLICE_BYTES]
        part[:] = source[start : start + _SLICE_BYTES]
        digest.update(part)
        await pace()
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
