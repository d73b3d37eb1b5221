"""The reading side of one carrier, as `SocketTransferClient` uses it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Carrier, RefusalReason
from services.kv.transfer.interface import FetchDenied


class Unreachable(OSError):
    """This carrier does not lead there; the ticket was not presented, so another may try."""


def refusal(reason: RefusalReason) -> Exception:
    """Why nothing could be attached: Unreachable where another carrier may do better."""
    return Unreachable(str(reason)) if reason is RefusalReason.CARRIER else FetchDenied(reason)


class Reader(Protocol):
    """Opens the connection of a fetch, and after it was granted takes the blocks."""

    @property
    def carrier(self) -> Carrier: ...

    async def open(self, ticket: Ticket) -> socket.socket:
        """A connection to the owner, over which `receive` can work. Raises Unreachable, FetchDenied, OSError,
        UnreadableMessage.
        """
        ...

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        """Copy the blocks into `into`, byte views of `block_bytes` each, and verify them. When it returns or raises, nothing
        writes there any more. Raises CorruptBlock, OSError, UnreadableMessage.
        """
        ...

    def close(self) -> None:
        """Let go of what was attached."""
        ...
