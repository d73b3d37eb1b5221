"""Control frames and bulk bytes on a non-blocking stream socket.

Owns: framing, socket options, addresses. Must not know: tickets, pools. Invariant: a read takes exactly the bytes of what it
reads, so bulk bytes go straight from the socket into pool memory, with no buffer between.

Deadlines are the caller's (`within` around a conversation). A reader also gives up a peer that says nothing for `silent_s`
seconds: a long conversation with a frozen process is none.
"""

from __future__ import annotations

import asyncio
import socket
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from schemas.codec import decode, encode
from schemas.errors import UnreadableMessage
from schemas.transfer import TRANSFER_READS
from services.kv.transfer.patience import within

MAX_FRAME = 1 << 20
"""Bytes; a Fetch of 50,000 blocks still fits."""
CHECKSUM_BYTES = 8
_LENGTH_BYTES = 4

M = TypeVar("M")


class PeerClosed(ConnectionError):
    """End of file where more was due."""


def tune(sock: socket.socket) -> None:
    """Non-blocking, no Nagle delay. Buffer sizes are the kernel's: a size set here would end its tuning, at a lower limit."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def advertised(host: str, port: int) -> str:
    """`host:port`, unless `host` brings its own port; a bare IPv6 host gets its brackets."""
    if host.count(":") > 1 and not host.startswith("["):
        return f"[{host}]:{port}"
    has_port = ":" in host and not host.endswith("]")
    return host if has_port else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f"not host:port: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def receive_into(sock: socket.socket, view: memoryview, *, silent_s: float | None = None) -> None:
    """Fill `view` from the socket. Raises PeerClosed, TimeoutError, OSError."""
    while view:
        try:
            count = sock.recv_into(view)
        except BlockingIOError:
            await readable(sock, silent_s)
            continue
        if count == 0:
            raise PeerClosed("end of file")
        view = view[count:]


async def readable(sock: socket.socket, silent_s: float | None = None) -> None:
    """Until there is something to read, or the end of file. Reads nothing. Raises TimeoutError: neither came in `silent_s`."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _wake, ready)
    try:
        async with within(silent_s):
            await ready
    finally:
        loop.remove_reader(sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def send_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    body = encode(message)
    await asyncio.get_running_loop().sock_sendall(sock, len(body).to_bytes(_LENGTH_BYTES, "little") + body)


async def until_closed(sock: socket.socket) -> None:
    """Returns at the end of file. Raises OSError, UnreadableMessage: the peer has nothing more to say."""
    if await asyncio.get_running_loop().sock_recv(sock, 1):
        raise UnreadableMessage("bytes where none are due")


@overload
async def receive_frame(sock: socket.socket, kind: type[M], *, silent_s: float | None = None) -> M: ...
@overload
async def receive_frame(sock: socket.socket, kind: UnionType, *, silent_s: float | None = None) -> Any: ...
async def receive_frame(sock: socket.socket, kind: Any, *, silent_s: float | None = None) -> Any:
    """The next frame as a `kind`. Raises PeerClosed, TimeoutError, OSError, UnreadableMessage."""
    head = bytearray(_LENGTH_BYTES)
    await receive_into(sock, memoryview(head), silent_s=silent_s)
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise UnreadableMessage(f"a frame of {length} bytes")
    body = bytearray(length)  # mostly it came with its length, and is read without a turn of the event loop
    await receive_into(sock, memoryview(body), silent_s=silent_s)
    return decode(bytes(body), kind, TRANSFER_READS)
