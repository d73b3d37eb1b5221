"""Copies blocks from memory that others may write into memory that is ours, and compares what arrived with its owner's checksums.

Invariant: a copy counts only when all of it has the checksum that the owner took, since its source may change at any time. It
runs on the event loop, in turns.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import xxhash

from services.kv.transfer.checksums import receive_checksums
from services.kv.transfer.interface import CorruptBlock
from services.kv.transfer.pace import Pace

_SLICE_BYTES = 1 << 20


async def copy_checked(sock: socket.socket, sources: Sequence[memoryview], into: Sequence[memoryview]) -> None:
    """Byte views of one size, one by one; their checksums come on `sock`. Raises CorruptBlock, OSError, UnreadableMessage."""
    pace = Pace()
    copied = [await _copy(source, view, pace) for source, view in zip(sources, into, strict=True)]
    if copied != await receive_checksums(sock, len(copied)):
        raise CorruptBlock("a KV block changed between its checksum and its copy")


async def _copy(source: memoryview, view: memoryview, pace: Pace) -> int:
    """The xxh3_64 of what arrived, taken while it is in the CPU's caches."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), _SLICE_BYTES):
        part = view[start : start + _SLICE_BYTES]
        part[:] = source[start : start + _SLICE_BYTES]
        digest.update(part)
        await pace()
    return digest.intdigest()
