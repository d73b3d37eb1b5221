"""What a reader keeps of the processes it reads from, for as long as they live.

Owns: one connection for each owner, over which it gave access to its memory once. Must not know: how memory is read. Invariant:
the end of that connection, by whichever side, ends the attachment; so the memory of a dead process is not kept.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

Opener = Callable[[], Awaitable[tuple[socket.socket, T]]]


class Attachments(Generic[T]):
    """By the name or address of the owner."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[socket.socket, T]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of owners that are being attached

    def __len__(self) -> int:
        return len(self._open)

    async def get(self, owner: str, attach: Opener[T]) -> T:
        """What is attached of `owner`; `attach` makes it, when nothing is. Raises what `attach` raises."""
        async with self._locks.setdefault(owner, asyncio.Lock()):
            if owner not in self._open:
                self._open[owner] = await attach()
                # It says nothing more, except end of file.
                asyncio.get_running_loop().add_reader(self._open[owner][0], self._end, owner)
            return self._open[owner][1]

    def close(self) -> None:
        for owner in list(self._open):
            self._end(owner)

    def _end(self, owner: str) -> None:
        sock, _ = self._open.pop(owner)
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()
