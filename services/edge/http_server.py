"""Granian inside our own event loop: one process, one port, a clean end; what a client may hold, and how long.

Invariants: no more connections are open than `Bounds` says, those beyond wait in the kernel; a connection on which headers are
not whole in time (of its first request or the next one) is closed, and so is one whose client takes nothing. Bodies have a
deadline of their own, where they are read. Granian refuses nothing on a busy port (it sets SO_REUSEPORT), so the port is tried
first. It cannot cut a request that goes on: whoever stops it sees to it that requests end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from dataclasses import dataclass

from granian._granian import ListenerSpec
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.types import ASGIApp

from services.settings.edge import EdgeSettings
from services.telemetry.logs import fields

_log = logging.getLogger("headrace.edge")
_START_S = 30.0
"""On a busy machine it takes seconds; whoever ends for that takes as long when it is started again."""
_BACKLOG = 2048
_MOST_HEADER_BYTES = 128 * 2**10
_OTHER_FILES = 256
"""Open files beside the connections: NATS, the database, the model, the log."""


class PortInUse(OSError):
    """Somebody else listens there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of all connections: `connections` at once; seconds for `headers`, and for a client that takes nothing (`write_s`)."""

    connections: int
    headers_s: float
    write_s: float

    @classmethod
    def of(cls, settings: EdgeSettings) -> Bounds:
        """The kernel's deadline is the later one: before it, the answer is ended in order."""
        return cls(settings.max_connections, settings.header_deadline_s, 2 * settings.write_deadline_s)


def free_port(host: str, port: int, setting: str = "PORT") -> int:
    """`port`, or a free one for 0. Raises `PortInUse`, which names the `setting` to change; OSError for an address not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                raise OSError(text) from None
            raise PortInUse(f"{text}; stop what uses it, or set HEADRACE_EDGE__{setting}") from None
        return int(probe.getsockname()[1])


class _Server(Server):
    """Granian's, on a socket whose connections the kernel ends when their client takes nothing for `write_s` seconds.

    Nothing else ends them: a write that waits cannot be cancelled here, and Granian has no deadline for it.
    """

    write_s: float

    def _init_shared_socket(self) -> None:
        made = ListenerSpec(self.bind_addr, self.bind_port, self.backlog).build()
        with socket.socket(fileno=os.dup(made.get_fd())) as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.write_s * 1000))
        self._ssp, self._shd = None, made  # type: ignore[assignment]


class HttpServer:
    def __init__(self, app: ASGIApp, host: str, port: int, bounds: Bounds) -> None:
        self.host = host
        self.port = free_port(host, port)
        self._server = _Server(
            app,
            address=host,
            port=self.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,  # when it has to find out which one it is, a connection that says nothing has no deadline
            http1_settings=HTTP1Settings(int(bounds.headers_s * 1000), max_buffer_size=_MOST_HEADER_BYTES),
            websockets=False,
            backlog=_BACKLOG,
            backpressure=_open_files_for(bounds.connections),
            log_enabled=False,
        )
        self._server.write_s = bounds.write_s
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Returns when the port answers. Raises OSError when it does not in time."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve())
        try:
            async with asyncio.timeout(_START_S):
                while not await self._answers():  # noqa: ASYNC110 - it tells nobody when it listens
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise OSError(f"the HTTP server did not start on {self.host}:{self.port}") from None

    async def stop(self, timeout: float) -> None:
        """No new connection; returns when the open requests have ended, or after `timeout` seconds."""
        if self._task is None:
            return
        self._server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait({self._task}, timeout=timeout)
        if not self._task.done():
            _log.warning("requests were still open when the HTTP server was left")
            self._task.cancel()

    async def _answers(self) -> bool:
        if self._task is not None and self._task.done():
            raise OSError(f"the HTTP server ended at its start: {self._task.exception()}")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        try:
            _, writer = await asyncio.open_connection(host, self.port)
        except OSError:
            return False
        writer.close()
        return True


def _open_files_for(connections: int) -> int:
    """So many connections as this process may have files, up to `connections`; its own limit is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        _log.warning(
            "fewer connections than edge.max_connections: the limit of open files (ulimit -Hn)", extra=fields(files=hard)
        )
    return max(1, min(connections, soft - _OTHER_FILES))
