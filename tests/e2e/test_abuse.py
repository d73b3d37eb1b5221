"""Clients that misuse a connection to a real edge: its memory stays flat, and workers compute nothing for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import pid
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.e2e.test_scripted import SLOW_DECODE, body
from tests.waiting import PATIENCE_S

MB = 2**20
STALLED = {"HEADRACE_EDGE__WRITE_DEADLINE_S": "1", "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.2"}
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LOUD = {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 400, "ignore_eos": True}
"""Some 20 kB a step, for 400 steps: the client's system takes no more after the first ones."""


def request(**fields: Any) -> bytes:
    """A chat, as bytes on a connection."""
    content = json.dumps(body(**fields)).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content


@asynccontextmanager
async def connection(up: Up) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def memory(process: int, field: str) -> int:
    """`VmRSS`: bytes a process has in memory now; `VmHWM`: the most it ever had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


async def _send_without_end(up: Up, most: int) -> int:
    """How much of a chunked body was sent before it was refused; raises AssertionError when it is not.

    Whoever refuses closes, and what is still sent then breaks the connection: a stream would forget what came before that.
    """
    part, sent, loop = 64 * 1024, 0, asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        async with asyncio.timeout(4 * PATIENCE_S):
            await loop.sock_connect(client, ("127.0.0.1", up.port))
            await loop.sock_sendall(client, CHUNKED)
            answer = asyncio.ensure_future(loop.sock_recv(client, 4096))
            with suppress(ConnectionError):
                while sent < most and not answer.done():
                    sent += part
                    await loop.sock_sendall(client, b"%x\r\n" % part + b" " * part + b"\r\n")
                    await asyncio.sleep(0)  # `sock_sendall` lets nobody else run as long as the system takes what is sent
            assert b" 413 " in (await answer).partition(b"\r\n")[0]
    return sent


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_bodies_without_end_do_not_fill_the_memory(scripted_stack: StartScripted) -> None:
    """faults.md, gateway: chunked without length over the limit -> 413 early, memory flat; eight at once, each over 4 MiB."""
    up = scripted_stack()
    edge = pid(up, "e1")
    await _send_without_end(up, 200 * MB)
    before = memory(edge, "VmRSS")
    for _ in range(3):
        sent = await asyncio.gather(*(_send_without_end(up, 200 * MB) for _ in range(8)))
        assert max(sent) < 32 * MB
    print(f"\nmost {memory(edge, 'VmHWM') / MB:.0f} MB, {before / MB:.0f} MB before; sent {max(sent) / MB:.1f} MB")
    assert memory(edge, "VmHWM") - before < 8 * 16 * MB, "each may hold its 4 MiB, and some of it twice"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no-stream"])
async def test_a_half_closed_connection_frees_slots_and_blocks(scripted_stack: StartScripted, stream: bool) -> None:
    """faults.md, gateway: client closes, half-close; stream and non-stream."""
    up = scripted_stack(**SLOW_DECODE)
    async with operator(up) as op, connection(up) as (_, writer):
        writer.write(request(stream=stream, max_tokens=400, ignore_eos=True))
        await op.until(lambda found: any(status["runs"] for name, status in found.items() if name.startswith("d")))
        writer.write_eof()
        await op.assert_clean()


async def test_a_stalled_reader_frees_slots_and_blocks(scripted_stack: StartScripted) -> None:
    """faults.md, gateway: a stalled reader meets the write deadline, the edge's own or the kernel's. Its job would take 80 s."""
    up = scripted_stack(**STALLED)
    async with operator(up) as op:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", up.port))
            await loop.sock_sendall(client, request(stream=True, **LOUD))
            await op.until(lambda found: any(status["runs"] for name, status in found.items() if name.startswith("d")))
            await op.assert_clean(3 * PATIENCE_S)
            assert 'headrace_requests_cancelled_total{model="tiny"} 1.0' in await op.metrics("edge")
