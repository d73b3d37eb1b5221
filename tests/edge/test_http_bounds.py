"""Connections that hold on to the server: each meets a deadline, and there are not more of them than was said."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from services.edge.api import unread
from tests.edge.fakes import MODEL, Api, Script
from tests.edge.test_http import served
from tests.text.tiny import byte_ids
from tests.waiting import until

PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LIMIT_S = 15.0


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the server closes the connection."""
    async with asyncio.timeout(LIMIT_S):
        return await reader.read()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"P", b""),
        (CHAT, b""),
        (CHAT + b"x-slow: 1", b""),
        (PROBE, b"HTTP/1.1 200"),
        (PROBE + b"GET /hea", b"HTTP/1.1 200"),
    ],
)
async def test_headers_that_do_not_come_end_the_connection(sent: bytes, answered: bytes) -> None:
    """faults.md, gateway: slow headers. The first ones, and those of a request that never follows another one."""
    async with served(Api(header_deadline_s=0.5)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert (await read_all(reader)).startswith(answered)
        writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """A byte at a time, for as long as the other side takes them."""
    while not writer.is_closing():
        writer.write(b"a")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("head", [CHAT + b"x-slow: ", CHAT + b"content-length: 100000\r\n\r\n{"])
async def test_a_slow_sender_meets_a_deadline_however_steadily_it_sends(head: bytes) -> None:
    """faults.md, gateway: slow headers, slow body. Headers end without a word, a body with a refusal; neither is kept alive by
    what trickles in."""
    api = Api(header_deadline_s=0.5, body_deadline_s=0.5)
    async with served(api) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        drip = asyncio.create_task(_drip(writer))
        answer = b""
        with suppress(ConnectionResetError):  # it was still sending when the server had closed
            async with asyncio.timeout(LIMIT_S):
                while part := await reader.read(2**16):
                    answer += part
        drip.cancel()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400" if b"length" in head else b"")
        await until(lambda: api.traffic.running == 0, timeout=LIMIT_S)
        assert api.jobs.handles == []


_WRONG = "hr-" + "a" * 16 + "-" + "b" * 52


@pytest.mark.parametrize(
    "value",
    [
        f"Bearer {_WRONG}".encode(),
        f"bearer   {_WRONG}".encode(),
        b"Bearer hr-" + b"x" * 100_000,
        b"Bearer hr-' OR 1=1; DROP TABLE api_keys; --",
        "Bearer hr-é🙂".encode(),
        b"Bearer hr-\xff\xfe",
    ],
)
async def test_no_value_of_authorization_is_more_than_a_wrong_key(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """faults.md, gateway: Authorization, as bytes on a connection; none of them comes back, or gets into a log."""
    caplog.set_level(logging.DEBUG)
    async with served(Api()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: " + value + b"\r\n\r\n")
        head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 401")
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    said = value.split()[-1].decode("latin-1")[:60]
    assert said not in body.decode() + caplog.text


async def test_headers_without_end_are_refused_while_memory_stays_small() -> None:
    async with served(Api()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CHAT)
        try:
            for number in range(1000):
                writer.write(b"x-%d: " % number + b"y" * 1000 + b"\r\n")
                await writer.drain()
            answer = await read_all(reader)
        except ConnectionError:
            answer = b""  # the server had closed before all was sent
        writer.close()
    assert answer.startswith(b"HTTP/1.1 431" if answer else b"")


@pytest.mark.parametrize("head", [CHAT + b"x-slow: ", CHAT + b"content-length: 100000\r\n\r\n{"])
async def test_others_are_served_meanwhile(head: bytes) -> None:
    """faults.md, gateway: slow headers, slow body; whoever sends in time is answered in between."""
    api = Api(header_deadline_s=60.0, body_deadline_s=60.0)
    async with served(api) as server:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
        for _, writer in slow:
            writer.write(head)
        drips = [asyncio.create_task(_drip(writer)) for _, writer in slow]
        if b"length" in head:
            await until(lambda: api.traffic.running == 100)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=LIMIT_S) as client:
            for _ in range(5):
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert not any(drip.done() for drip in drips), "the slow ones were still there"
        for drip, (_, writer) in zip(drips, slow, strict=True):
            drip.cancel()
            writer.close()


async def test_a_body_without_length_is_refused_as_soon_as_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md, gateway: chunked without length over the limit. The client reads the answer while it sends, or when it has sent
    all: its connection is not broken."""
    monkeypatch.setattr(unread, "_SILENCE_S", LIMIT_S)
    monkeypatch.setattr(unread, "_MOST_S", LIMIT_S)
    limit, part = 100_000, 10_000
    async with served(Api(max_body_bytes=limit)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CHAT + b"transfer-encoding: chunked\r\n\r\n")
        head = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        async with asyncio.timeout(LIMIT_S):
            for sent in range(part, 20 * 2**20, part):
                writer.write(b"%x\r\n" % part + b" " * part + b"\r\n")
                await writer.drain()
                if sent > limit and not head.done():
                    await asyncio.wait({head})  # it goes on only after the answer
            writer.write(b"0\r\n\r\n")
            assert (await head).startswith(b"HTTP/1.1 413")
            assert b"payload_too_large" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()


async def test_connections_beyond_the_bound_wait_until_others_end() -> None:
    async with served(Api(max_connections=3)) as server:
        first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for reader, writer in first:
            writer.write(PROBE)
            assert b" 200 " in await reader.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PROBE)
        answer = asyncio.ensure_future(reader.readline())
        assert not (await asyncio.wait({answer}, timeout=0.5))[0]
        first[0][1].close()
        async with asyncio.timeout(LIMIT_S):
            assert b" 200 " in await answer
        for _, each in [*first[1:], (reader, writer)]:
            each.close()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="connections are read from /proc")
async def test_a_client_that_takes_nothing_loses_its_connection() -> None:
    """faults.md, gateway: a stalled reader. It never reads and never closes: only the kernel's deadline ends that, and gives what
    was buffered back."""
    api = Api(write_deadline_s=0.5)
    api.jobs.default = Script([byte_ids("x" * 100_000)] * 400)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    async with served(api) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
            await asyncio.get_running_loop().sock_sendall(client, CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: api.jobs.handles and api.jobs.handles[0].cancelled.is_set(), timeout=LIMIT_S)
            assert _accepted(server.port) <= {client.getsockname()[1]}
            await until(lambda: not _accepted(server.port), timeout=30.0)


def _accepted(port: int) -> set[int]:
    """The other side's ports of our side's open connections at `port`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [row for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "01"]
    return {int(row[2].partition(":")[2], 16) for row in ours}
