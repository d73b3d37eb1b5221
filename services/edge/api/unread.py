"""What nobody read of a request's body, read after the answer and thrown away.

Whoever answers and closes while the client still sends makes the client's system drop the answer: a refusal would be seen as a
broken connection, and tried again. So the answer is sent at once, and its end when the client has sent all.
Invariant: bounded in bytes and in time, whatever is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import Message, Receive, Scope

from services.edge.api.watch import Header

_MOST_BYTES = 32 * 2**20
_MOST_S = 5.0
_SILENCE_S = 0.25
"""A client that sends nothing for so long has read its answer, or waits for its end."""


class Unread:
    """Stands before `receive`. Of a client that waits for `100 Continue` nothing is wanted that nobody read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._receive = receive
        self.more = has_body and b"expect" not in headers
        """Whether the client may still send."""

    async def receive(self) -> Message:
        message = await self._receive()
        self.more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def without_length(self, headers: Iterable[Header]) -> list[Header]:
        """An answer whose end is not told by its length can be whole before the client has sent all, and end after it."""
        return [header for header in headers if not (self.more and header[0] == b"content-length")]

    async def discard(self) -> None:
        """Returns when the body is over, or too long in coming."""
        left = _MOST_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                while self.more and left > 0:
                    async with asyncio.timeout(_SILENCE_S):
                        left -= len((await self.receive()).get("body", b""))
