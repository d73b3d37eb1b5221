"""Blocks read out of the owner's memory by NIXL, whatever lies between: RDMA, NVLink, shared memory, TCP.

Owns: what is known of owners' memory. Must not know: how NIXL is driven. Invariant: KV blocks are written by a copy on the event
loop, out of memory that NIXL has finished writing; so nothing writes there after a fetch ended, however it ended.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Attach, Attached, Carrier
from services.kv.transfer.attachments import Attachments
from services.kv.transfer.copying import copy_checked
from services.kv.transfer.interface import SILENT_S, CorruptBlock
from services.kv.transfer.nixl_agent import NixlAgent
from services.kv.transfer.reader import Unreachable, refusal
from services.kv.transfer.stream import connect_tcp
from services.kv.transfer.wire import receive_frame, send_frame

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Memory of `size` bytes at address `base` of the process whose NIXL agent has this name."""

    agent: str
    base: int
    size: int


class NixlReader:
    """A `Reader` of tickets that say `nixl`."""

    carrier = Carrier.NIXL

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._owners: Attachments[Owner] = Attachments()

    async def open(self, ticket: Ticket) -> socket.socket:
        if not ticket.nixl or self._agent.is_exhausted:
            raise Unreachable("not offered" if not ticket.nixl else "too many transfers have not ended")
        try:
            await self._owner(ticket)
            return await connect_tcp(ticket.address)
        except OSError as error:
            raise Unreachable(str(error)) from error

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        owner = await self._owner(ticket)
        if any(not 0 <= block.slot < owner.size // block_bytes for block in blocks):
            raise CorruptBlock("a block lies outside the memory that was lent")
        if not blocks:
            return
        arena = await self._agent.read(owner.agent, [(owner.base + block.slot * block_bytes, block_bytes) for block in blocks])
        try:
            copies = [arena.view[start : start + block_bytes] for start in range(0, len(blocks) * block_bytes, block_bytes)]
            await copy_checked(sock, copies, into)
        finally:
            self._agent.recycle(arena)

    def close(self) -> None:
        self._owners.close()

    async def _owner(self, ticket: Ticket) -> Owner:
        return await self._owners.get(ticket.address, lambda: self._attach(ticket))

    async def _attach(self, ticket: Ticket) -> tuple[socket.socket, Owner]:
        sock = await connect_tcp(ticket.address)
        try:
            await send_frame(sock, Attach(token=ticket.token, carrier=Carrier.NIXL))
            attached = await receive_frame(sock, Attached, silent_s=SILENT_S)
            if attached.refused is not None:
                raise refusal(attached.refused)
            owner = Owner(await self._agent.add(attached.agent), attached.base, attached.size)
            _log.info("KV transfer: NIXL reaches %d MB of %s", attached.size >> 20, ticket.address)
            return sock, owner
        except BaseException:
            sock.close()
            raise
