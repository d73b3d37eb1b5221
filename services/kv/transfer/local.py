"""Sockets that only processes of this host and user can reach, and descriptors passed over them. Linux.

Owns: names, the check of the user. Must not know: what is said. Invariant: a name is random, in the kernel's abstract namespace,
so whoever reaches the owner by it is in the same network namespace; nothing is left on disk, however the owner ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys

from services.kv.transfer.interface import SILENT_S
from services.kv.transfer.wire import readable

_PREFIX = "headrace-kv-"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def listen(backlog: int) -> tuple[socket.socket, str]:
    """A listener and its name. Raises OSError, also where there are no such sockets."""
    if sys.platform != "linux":
        raise OSError("local sockets need Linux")
    name = _PREFIX + secrets.token_hex(16)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock, name


async def connect(name: str) -> socket.socket:
    """Raises OSError: nobody here has this name, or it is another user's."""
    if sys.platform != "linux" or not name.startswith(_PREFIX):
        raise OSError("not a local socket of ours")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
        if not same_user(sock):
            raise PermissionError("the peer is another user")
    except BaseException:
        sock.close()
        raise
    return sock


def same_user(sock: socket.socket) -> bool:
    """Is the peer of a local connection this user? By the kernel's word, not the peer's."""
    if sys.platform != "linux":
        return False
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def send_descriptor(sock: socket.socket, fd: int) -> None:
    """One byte, which carries `fd`. Nothing may be queued on `sock`: the byte then fits at once. Raises OSError."""
    socket.send_fds(sock, [b"\0"], [fd])


async def receive_descriptor(sock: socket.socket) -> int:
    """The descriptor that the next byte carries; the caller closes it. Raises OSError: none came (TimeoutError: nothing did)."""
    await readable(sock, SILENT_S)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise OSError("no descriptor came")
    return fds[0]
