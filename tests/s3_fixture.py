"""An S3 server (moto's own, a process), and a wire to it that can be cut, slowed and made to answer for it."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from obstore.store import S3Store

from tests.ports import free_port

REGION = "us-east-1"
START_S = 60.0
_BUSY = b"<Error><Code>SlowDown</Code></Error>"
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_BUSY), _BUSY)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class S3:
    """`environment`: what a process needs to reach it, as the cloud's own tools are told."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.url)

    def make_bucket(self) -> str:
        """A new one's name."""
        name = f"bucket-{next(_NUMBERS)}"
        self.request("PUT", f"/{name}")
        return name

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Unsigned: moto takes it for buckets and for itself, not for objects."""
        request = urllib.request.Request(self.url + path, data=body, method=method, headers={"Content-Type": "text/plain"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def objects(self, bucket: str) -> S3Store:
        """The bucket as its owner sees it."""
        return S3Store(
            bucket,
            endpoint=self.url,
            access_key_id="key",
            secret_access_key="secret",
            region=REGION,
            client_options={"allow_http": True},
        )

    def key(self, bucket: str, name: str) -> str:
        """The key of the object that is file `name`."""
        listed = self.objects(bucket).list().collect()
        (found,) = (meta["path"] for meta in listed if meta["path"].endswith(f"/{name}"))
        return found


def environment(url: str, secret: str = "secret", key: str = "key") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": REGION,
    }


class MotoServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._log = folder / "moto.log"

    def start(self) -> S3:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
            )
        s3 = S3(f"http://127.0.0.1:{self.port}")
        deadline = time.monotonic() + START_S
        while True:
            try:
                s3.request("GET", "/moto-api/data.json")
                return s3
            except OSError:
                assert self._process.poll() is None, f"moto ended: {self._log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"moto does not answer: {self._log.read_text()[-2000:]}"
                time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Wire:
    """A TCP relay to a server. `answer`: sent for each request instead of asking the server. `down_limit`: bytes from the server
    until it is cut for good. `rate`: bytes a second from the server. While `open` is not set nothing comes. `down`: what came."""

    def __init__(self, server: str) -> None:
        self._port = int(server.rpartition(":")[2])
        self.url = ""
        self.answer = b""
        self.down_limit: int | None = None
        self.rate: float | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.down = 0
        self.connections = 0

    @property
    def cut(self) -> bool:
        return self.down_limit is not None and self.down >= self.down_limit

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            if self.cut:
                return
            if self.answer:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer)
                await writer.drain()
                return
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
            up = asyncio.create_task(self._up(reader, to_writer))
            try:
                await self._down(to_reader, writer)
            finally:
                up.cancel()
                to_writer.close()
                await asyncio.gather(up, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # nobody waits for it
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(16384):
            await self.open.wait()
            if self.rate is not None:
                await asyncio.sleep(len(data) / self.rate)
            if self.down_limit is not None:
                data = data[: max(0, self.down_limit - self.down)]
            writer.write(data)
            await writer.drain()
            self.down += len(data)
            if self.cut:
                return


@asynccontextmanager
async def wire_to(s3: S3) -> AsyncIterator[Wire]:
    wire = Wire(s3.url)
    serving: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No coroutine function: tasks that asyncio makes itself are nobody's, and Python 3.11 complains when they are cancelled.
        serving.append(asyncio.create_task(wire.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
