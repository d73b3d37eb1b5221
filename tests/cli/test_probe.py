"""Questions that are always answered, whatever listens there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.cli.up import probe
from services.cli.up.ports import port_is_free
from services.cli.up.probe import http_status, nats_answers
from tests.nats_fixture import NatsServer
from tests.ports import free_port
from tests.waiting import PATIENCE_S

REQUEST = b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1:1\r\n"  # the least of it: a port may be short


@asynccontextmanager
async def answering(text: bytes, *, after: int = 0) -> AsyncIterator[int]:
    """A server that reads `after` bytes, says `text` and closes; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(after)
        writer.write(text)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_nats_server_is_recognised(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ANSWER_S", PATIENCE_S)
    assert await nats_answers("127.0.0.1", nats_server.port)
    assert not port_is_free("127.0.0.1", nats_server.port)


async def test_nobody_there() -> None:
    port = free_port()
    assert not await nats_answers("127.0.0.1", port)
    assert await http_status("127.0.0.1", port, "/ready") == (0, "")
    assert port_is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nready\n", (200, "ready")),
        (b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"workers":0}', (503, '{"workers":0}')),
        (b"SSH-2.0-OpenSSH_9.2\r\n", (0, "")),
        (b"HTTP/1.1\r\n\r\n", (0, "")),
        (b"", (0, "")),
    ],
)
async def test_http_answers(text: bytes, answer: tuple[int, str]) -> None:
    async with answering(text, after=len(REQUEST)) as port:
        assert await http_status("127.0.0.1", port, "/ready") == answer


async def test_something_else_is_not_nats() -> None:
    async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert not await nats_answers("127.0.0.1", port)


async def test_one_that_never_answers_costs_its_deadline_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ANSWER_S", 0.1)
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.wait_for(http_status("127.0.0.1", port, "/ready"), PATIENCE_S) == (0, "")
        assert connected.is_set()
