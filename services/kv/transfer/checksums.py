"""The checksums of blocks whose bytes the reader takes itself.

Owns: how they are grouped into frames. Invariant: the owner reads its blocks while the reader does, and neither holds its event
loop for much longer than a turn.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from schemas.errors import UnreadableMessage
from schemas.transfer import Checksums
from services.kv.pool import BlockPool
from services.kv.transfer.interface import SILENT_S
from services.kv.transfer.pace import Pace
from services.kv.transfer.wire import CHECKSUM_BYTES, receive_frame, send_frame

_BLOCKS_A_FRAME = 1024


async def send_checksums(sock: socket.socket, pool: BlockPool, slots: Sequence[int], check_open: Callable[[], None]) -> None:
    """Those of `slots`, in order. `check_open` raises when they may not be read any more."""
    pace = Pace()
    for start in range(0, len(slots), _BLOCKS_A_FRAME):
        digests = bytearray()
        for slot in slots[start : start + _BLOCKS_A_FRAME]:
            check_open()
            digests += pool.checksum(slot).to_bytes(CHECKSUM_BYTES, "little")
            await pace()
        await send_frame(sock, Checksums(digests=bytes(digests)))


async def receive_checksums(sock: socket.socket, count: int) -> list[int]:
    """Those of `count` blocks. Raises OSError, UnreadableMessage."""
    digests = b""
    while len(digests) < count * CHECKSUM_BYTES:
        more = (await receive_frame(sock, Checksums, silent_s=SILENT_S)).digests
        if not more or len(more) % CHECKSUM_BYTES:
            raise UnreadableMessage(f"checksums of {len(more)} bytes")
        digests += more
    return [int.from_bytes(digests[start : start + CHECKSUM_BYTES], "little") for start in range(0, len(digests), CHECKSUM_BYTES)]
