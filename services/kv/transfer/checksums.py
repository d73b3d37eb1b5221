"""The checksums of blocks whose bytes the reader takes itself.

Owns: how they are grouped into frames. Invariant: neither side holds its event loop for more than about a millisecond; the reader
verifies the first blocks while the owner still reads the last ones.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

from schemas.errors import UnreadableMessage
from schemas.transfer import Checksums
from services.kv.pool import BlockPool
from services.kv.transfer.wire import CHECKSUM_BYTES, receive_frame, send_frame

_SLICE_S = 0.0003


async def send_checksums(sock: socket.socket, pool: BlockPool, slots: Sequence[int], check_open: Callable[[], None]) -> None:
    """Those of `slots`, in frames of what could be had in a moment. `check_open` raises when they may not be read any more."""
    position = 0
    while position < len(slots):
        check_open()
        until, digests = time.perf_counter() + _SLICE_S, bytearray()
        while position < len(slots) and (not digests or time.perf_counter() < until):
            digests += pool.checksum(slots[position]).to_bytes(CHECKSUM_BYTES, "little")
            position += 1
        await send_frame(sock, Checksums(digests=bytes(digests)))
        await asyncio.sleep(0)


class ChecksumReader:
    """The checksums that arrive on `sock`, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._digests = b""

    async def next(self) -> int:
        """Raises OSError, UnreadableMessage."""
        if not self._digests:
            self._digests = (await receive_frame(self._sock, Checksums)).digests
            if not self._digests or len(self._digests) % CHECKSUM_BYTES:
                raise UnreadableMessage(f"checksums of {len(self._digests)} bytes")
        first, self._digests = self._digests[:CHECKSUM_BYTES], self._digests[CHECKSUM_BYTES:]
        return int.from_bytes(first, "little")
