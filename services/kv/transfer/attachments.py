"""What a reader keeps of the processes it reads from, for as long as they live.

Owns: one connection for each owner, over which it gave access to its memory once. Must not know: how memory is read. Invariant:
the end of that connection, by whichever side, ends the attachment; so the memory of a dead process is not kept.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Opener = Callable[[], Awaitable[tuple[socket.socket, T]]]


class Attachments(Generic[T]):
    """By the name or address of the owner. `on_end` hears of each that ends."""

    def __init__(self, on_end: Callable[[T], None] = lambda attached: None) -> None:
        self._on_end = on_end
        self._open: dict[str, tuple[socket.socket, T]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def get(self, owner: str, attach: Opener[T]) -> T:
        """What is attached of `owner`; `attach` makes it, when nothing is. Raises what `attach` raises."""
        if owner not in self._open:
            sock, attached = await attach()
            if owner in self._open:  # another fetch was faster
                sock.close()
                self._on_end(attached)
            else:
                self._open[owner] = sock, attached
                asyncio.get_running_loop().add_reader(sock, self._end, owner)  # it says nothing more, but end of file
        return self._open[owner][1]

    def close(self) -> None:
        for owner in list(self._open):
            self._end(owner)

    def _end(self, owner: str) -> None:
        sock, attached = self._open.pop(owner)
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()
        self._on_end(attached)
