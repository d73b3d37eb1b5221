"""The real HTTP server on loopback: the official SDK, and sockets that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
import uvloop

from schemas.errors import JobFailed
from services.edge.http_server import Bounds, HttpServer, PortInUse
from services.settings.edge import EdgeSettings
from tests.edge.fakes import MODEL, Api, FakeHandle, Script, says
from tests.edge.sse import read_stream
from tests.ports import free_port
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[HttpServer]:
    server = HttpServer(api.app, "127.0.0.1", free_port(), Bounds.of(api.served.settings))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(2.0)


@asynccontextmanager
async def sdk(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


async def request(server: HttpServer, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request by hand."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + body)
    return reader, writer


async def running(api: Api) -> FakeHandle:
    """The only job, once it waits for something that will not come."""
    await until(lambda: api.jobs.handles and api.jobs.handles[0].waiting.is_set())
    return api.jobs.handles[0]


async def test_sdk() -> None:
    api = Api()
    api.jobs.default = says("he", "llo ", "🙂")
    async with served(api) as server, sdk(server) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "headrace"
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
        whole = raw.parse()
        assert raw.headers["x-request-id"] == "req-made"
        assert whole.choices[0].message.content == "hello 🙂"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage
        assert whole.usage.completion_tokens == 10
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello 🙂"
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


async def test_sdk_exceptions() -> None:
    api = Api()
    failing = says("abc")
    failing.error = JobFailed("The model failed on this request.")
    async with served(api) as server, sdk(server) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="gpt-4", messages=MESSAGES)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=MESSAGES, temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as empty:
            await create(model=MODEL, messages=[])
        assert empty.value.code == "empty_array"
        api.jobs.scripts = [failing]
        stream: Any = await create(model=MODEL, messages=MESSAGES, stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "abc"]
        with pytest.raises(openai.APIError, match="The model failed"):
            await anext(stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_leaves_while_tokens_come(stream: bool, half: bool) -> None:
    """Case 19: (a) and (c); faults.md, gateway: client closes, half-close. A half-closed connection counts as gone."""
    api = Api()
    api.jobs.default = says("hello", finish=None)
    async with served(api) as server:
        reader, writer = await request(server, stream=stream)
        if stream:
            await reader.readuntil(b"hello")
        handle = await running(api)
        assert not handle.cancelled.is_set()
        if half:
            writer.write_eof()
        else:
            writer.close()
        await until(handle.cancelled.is_set)
        await until(lambda: api.traffic.running == 0)
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_job_is_admitted(stream: bool) -> None:
    """Case 19 (b), in the queue."""
    api = Api()
    api.jobs.default = Script(admit=asyncio.Event())
    async with served(api) as server:
        _, writer = await request(server, stream=stream)
        handle = await running(api)
        writer.close()
        await until(handle.cancelled.is_set)
        await until(lambda: api.traffic.running == 0)


async def test_headers_come_at_admission() -> None:
    """Invariant 10: before the first token."""
    api = Api()
    api.jobs.default = Script(go=asyncio.Event())
    async with served(api) as server:
        reader, writer = await request(server, stream=True)
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"x-accel-buffering: no" in head
        writer.close()


async def test_a_client_that_leaves_in_the_middle_of_its_request() -> None:
    api = Api()
    async with served(api) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: api.traffic.running == 1)
        writer.close()
        await until(lambda: api.traffic.running == 0)
        assert api.jobs.handles == []


@pytest.mark.parametrize("sent", [b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n"])
async def test_a_body_that_ends_in_the_middle_is_told_so(sent: bytes) -> None:
    """Framing that is none, or a client that sends no more and still reads."""
    async with served(Api()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + sent)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        assert b" 400 " in answer.splitlines()[0]
        assert b"The body ended before it was whole." in answer
        writer.close()


async def test_a_body_that_does_not_arrive() -> None:
    async with served(Api(body_deadline_s=0.1)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 400 " in await reader.readline()
        writer.close()


async def test_a_client_that_stops_reading() -> None:
    """B5; faults.md, gateway: a stalled reader. The write deadline ends the job; the connection is closed."""
    api = Api(write_deadline_s=0.3)
    api.jobs.default = Script([byte_ids("x" * 100_000)] * 400)
    async with served(api) as server:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port))
            body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
            await asyncio.get_running_loop().sock_sendall(raw, _HEAD % len(body) + body)
            await until(lambda: api.jobs.handles and api.jobs.handles[0].cancelled.is_set())
            await until(lambda: api.traffic.running == 0)
            received = 0
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionResetError):  # the kernel's own deadline was sooner than this reader
                    while data := await asyncio.get_running_loop().sock_recv(raw, 1 << 20):
                        received += len(data)
        assert received < 400 * 100_000


async def test_a_disconnect_after_the_finish_is_no_cancel() -> None:
    """B6: the SDK closes as soon as it reads [DONE]."""
    api = Api()
    async with served(api) as server:
        reader, writer = await request(server, stream=True)
        await reader.readuntil(b"[DONE]")
        writer.close()
        await until(lambda: api.traffic.running == 0)
        assert not api.jobs.handles[0].cancelled.is_set()
    assert b"headrace_requests_cancelled_total{" not in api.metrics.prometheus_text()


async def test_a_busy_port_is_one_clear_line() -> None:
    async with served(Api()) as server:
        with pytest.raises(PortInUse, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: .*HEADRACE_EDGE__PORT"):
            HttpServer(Api().app, "127.0.0.1", server.port, Bounds.of(EdgeSettings()))


async def test_more_chats_at_once_than_the_backlog() -> None:
    """Granian's own limit would let 128 in."""
    api = Api()
    go = asyncio.Event()
    script = says("hello")
    script.go = go
    api.jobs.default = script
    async with served(api) as server:
        clients = [await request(server, stream=True) for _ in range(200)]
        await until(lambda: len(api.jobs.handles) == 200, timeout=60.0)
        go.set()
        for reader, writer in clients:
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b"[DONE]")
            writer.close()


def test_under_uvloop() -> None:
    """The loop of real processes."""

    async def main() -> None:
        api = Api()
        go = asyncio.Event()
        script = says("hello", finish=None)
        script.go = go
        api.jobs.scripts = [says("hello"), script]
        async with served(api) as server:
            reader, writer = await request(server, stream=True)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            data = await reader.readuntil(b"0\r\n\r\n")
            assert read_stream(_unchunked(data)).content == "hello"
            writer.close()
            _, writer = await request(server, stream=False)
            await until(lambda: len(api.jobs.handles) == 2)
            writer.close()
            await until(api.jobs.handles[1].cancelled.is_set)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 413), ("/v1/nothing", 404), ("/v1/models", 405)])
async def test_a_refusal_reaches_a_client_that_still_sends(path: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing on it would make its system throw the answer away: a broken connection, which SDKs try again."""
    for bound in ("_SILENCE_S", "_MOST_S"):  # on a slow machine it may take longer to send all
        monkeypatch.setattr(f"services.edge.api.unread.{bound}", PATIENCE_S)
    async with served(Api()) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        for size in (5_000_000, 20_000_000):
            response = await client.post(path, content=b"x" * size, headers={"content-type": "application/json"})
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_refusal_does_not_wait_for_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.edge.api.unread._MOST_S", 60.0)
    async with served(Api()) as server:
        for extra in (b"", b"expect: 100-continue\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + extra + b"content-length: 99999999\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert b" 413 " in await reader.readline()
            writer.close()


async def test_what_http_allows_has_the_envelope() -> None:
    """HTTP/1.0, pipelined requests, odd methods and paths."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
    chat = (_HEAD % len(body)) + body
    async with served(Api()) as server:
        for sent, statuses in (
            (chat.replace(b"HTTP/1.1", b"HTTP/1.0"), [200]),
            (chat + b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /%ff%ed%a0%80 HTTP/1.0\r\n\r\n", [200, 405, 404]),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            for status in statuses:
                async with asyncio.timeout(PATIENCE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                    answer = json.loads(await reader.readexactly(length))
                assert int(head.split()[1]) == status
                assert b"x-request-id: " in head
                assert ("error" in answer) == (status != 200)
            writer.close()


async def test_head_has_no_body() -> None:
    """What follows on the connection is the next answer."""
    async with served(Api()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for path, status in ((b"/v1/models", b" 200 "), (b"/nothing", b" 404 ")):
            writer.write(b"HEAD %s HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            async with asyncio.timeout(PATIENCE_S):
                head, health = [await reader.readuntil(b"\r\n\r\n") for _ in range(2)]
                assert await reader.readexactly(15) == b'{"status":"ok"}'
            assert status in head.splitlines()[0]
            assert b" 200 " in health.splitlines()[0]
        writer.close()
