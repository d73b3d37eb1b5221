"""An answer and its client, raced: a client that is gone, or stops reading, ends the work at once.

Owns the only reader of `receive` once the body is read, for streams and whole answers alike. One task an answer, none a write: a
write that waits is seen from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from starlette.types import Receive, Send

_LEAVE_S = 0.1
SEND_BODY = "send_body"
"""In a scope's state: where bodies go straight to. Whatever stands between an answer and the server looks at the head only, and
each of them would cost each token a call."""
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
    """A response's head and body to where each is sent, and since when a write waits for a client that does not read."""

    def __init__(self, head: Send, body: Send) -> None:
        self._head = head
        self._body = body
        self._time = asyncio.get_running_loop().time
        self._since: float | None = None
        self.started = False

    def waits(self) -> float:
        """Seconds the write in progress has waited; 0.0 when there is none."""
        return 0.0 if self._since is None else self._time() - self._since

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        self._since = self._time()
        try:
            await self._head({"type": "http.response.start", "status": status, "headers": list(headers)})
        finally:
            self._since = None

    async def body(self, data: bytes, *, more: bool = True) -> None:
        self._since = self._time()
        try:
            await self._body({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._since = None


async def watched(
    receive: Receive, head: Send, body: Send, work: Callable[[Writer], Awaitable[None]], *, write_deadline: float
) -> Gone | None:
    """Do `work`, which writes to `head` and `body`. Returns why it was ended early, None when it was not; what `work` raises is
    raised.

    A stalled write cannot be cancelled in every server, so it is left behind: it ends with the connection.
    """
    writer = HttpWriter(head, body)
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
