"""Granian inside our own event loop: one process, one port, a clean end.

Granian refuses nothing on a busy port (it sets SO_REUSEPORT), so the port is tried first. It cannot cut a request that goes on:
whoever stops it sees to it that requests end.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.types import ASGIApp

_log = logging.getLogger("headrace.edge")
_START_S = 5.0
_BACKLOG = 2048
_MOST_REQUESTS = 16_384
"""At once; Granian's own default is the backlog, and a chat holds its place for minutes."""


class PortInUse(OSError):
    """Somebody else listens there."""


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `PortInUse`; OSError for a host that is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it, or set HEADRACE_EDGE__PORT"
            raise PortInUse(text) from None
        return int(probe.getsockname()[1])


class HttpServer:
    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.host = host
        self.port = free_port(host, port)
        self._server = Server(
            app,
            address=host,
            port=self.port,
            interface=Interfaces.ASGINL,
            websockets=False,
            backlog=_BACKLOG,
            backpressure=_MOST_REQUESTS,
            log_enabled=False,
        )
        self._task: asyncio.Task[None] | None = None

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
