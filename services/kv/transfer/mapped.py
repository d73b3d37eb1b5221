"""Blocks copied out of the owner's memory, which is mapped here: two processes of one host and user.

Owns: the mappings of other processes' pools. Must not know: engines. Invariant: a mapping is
read-only, of memory that cannot shrink, and ends with the process that owns it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Attach, Attached, Carrier
from services.kv.memory import map_shared
from services.kv.transfer import local
from services.kv.transfer.attachments import Attachments
from services.kv.transfer.copying import copy_checked
from services.kv.transfer.interface import SILENT_S, CorruptBlock
from services.kv.transfer.reader import Unreachable, refusal
from services.kv.transfer.wire import receive_frame, send_frame

_log = logging.getLogger(__name__)


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
        sources = [memory[block.slot * block_bytes : (block.slot + 1) * block_bytes] for block in blocks]
        if any(source.nbytes != block_bytes for source in sources):
            raise CorruptBlock("a block lies outside the memory that was passed")
        await copy_checked(sock, sources, into)

    @property
    def attached(self) -> int:
        """How many processes' memory is mapped."""
        return len(self._memories)

    def close(self) -> None:
        self._memories.close()

    async def memory(self, ticket: Ticket) -> memoryview:
        """The whole memory of the ticket's owner, read-only. Raises FetchDenied, OSError, UnreadableMessage."""
        return await self._memories.get(ticket.local, lambda: _attach(ticket))


async def _attach(ticket: Ticket) -> tuple[socket.socket, memoryview]:
    sock = await local.connect(ticket.local)
    try:
        await send_frame(sock, Attach(token=ticket.token, carrier=Carrier.MAPPED))
        attached = await receive_frame(sock, Attached, silent_s=SILENT_S)
        if attached.refused is not None:
            raise refusal(attached.refused)
        fd = await local.receive_descriptor(sock)
        try:
            memory = map_shared(fd, attached.size)
            _log.info("KV transfer: mapped %d MB of %s", attached.size >> 20, ticket.address)
            return sock, memory
        finally:
            os.close(fd)
    except BaseException:
        sock.close()
        raise
