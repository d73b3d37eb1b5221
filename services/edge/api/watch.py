"""An answer and its client, raced: a client that is gone, or stops reading, ends the work at once.

Owns the only reader of `receive` once the body is read, for streams and whole answers alike. One task an answer, none a write: a
write that waits is seen from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from starlette.types import Message, Receive, Send

_LEAVE_S = 0.1
Header = tuple[bytes, bytes]


class Gone(Enum):
    DISCONNECTED = auto()
    STALLED = auto()


class Writer(Protocol):
    """Where an answer goes."""

    @property
    def started(self) -> bool: ...

    async def start(self, status: int, headers: Iterable[Header]) -> None: ...

    async def body(self, data: bytes, *, more: bool = True) -> None: ...


class HttpWriter:
    """`send`, and since when it waits for a client that does not read."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._since: float | None = None
        self.started = False

    def waits(self) -> float:
        """Seconds the write in progress has waited; 0.0 when there is none."""
        return 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def body(self, data: bytes, *, more: bool = True) -> None:
        await self._write({"type": "http.response.body", "body": data, "more_body": more})

    async def _write(self, message: Message) -> None:
        self._since = asyncio.get_running_loop().time()
        try:
            await self._send(message)
        finally:
            self._since = None


async def watched(
    receive: Receive, send: Send, work: Callable[[Writer], Awaitable[None]], *, write_deadline: float
) -> Gone | None:
    """Do `work`. Returns why it was ended early, None when it was not; what `work` raises is raised.

    A stalled write cannot be cancelled in every server, so it is left behind: it ends with the connection.
    """
    writer = HttpWriter(send)
    task = asyncio.ensure_future(_run(work, writer))
    listener = asyncio.ensure_future(_disconnect(receive))
    try:
        while True:
            await asyncio.wait({task, listener}, timeout=write_deadline / 4, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return None
            if listener.done():
                return Gone.DISCONNECTED
            if writer.waits() > write_deadline:
                return Gone.STALLED
    finally:
        listener.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_LEAVE_S)


async def _run(work: Callable[[Writer], Awaitable[None]], writer: Writer) -> None:
    await work(writer)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # anything a client sends after its body is ignored
