"""An edge's chat API over a real NATS server with accounts, and tenants who call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.subjects import Subjects
from services.bus.nats_bus import Credentials, connect
from services.cli.up.nats import violations
from services.clock import SystemClock
from services.edge.gate.accounts import Accounts
from services.edge.gate.records import AccountRecord
from services.edge.nats_api.chat import NatsChat, chat_service
from services.edge.tenant import tenant
from tests.edge.cluster import EDGE
from tests.edge.fakes import MODEL, Api, FakeAccounts
from tests.infra.accounts import AccountServer
from tests.waiting import PATIENCE_S, until

SECRET = b"x" * 32
CHAT = Subjects().chat()


@asynccontextmanager
async def edge(
    server: AccountServer,
    *told: AccountRecord,
    most: int = 8,
    api: Api | None = None,
    drain_s: float = PATIENCE_S,
    name: str = EDGE,
    loses_it: bool = False,
) -> AsyncIterator[Api]:
    """`told`: what accounts may do. `loses_it`: the connection, which nobody else can make it do."""
    api, store = api or Api(), FakeAccounts()
    store.told(*told)
    credentials = Credentials("edge", server.passwords["edge"])
    bus = await connect(
        [server.url], name, "edge", credentials=credentials, timeout=PATIENCE_S, ping_interval=PATIENCE_S
    )  # a server that others let wait is not left: whoever loses the connection here lost it by what was sent
    accounts = Accounts(store, lambda name: tenant(SECRET, name), SystemClock())
    chat = NatsChat(bus, Subjects(), api.served, api.traffic, accounts, Random(name))
    service = chat_service(bus, Subjects(), chat, most, {})
    try:
        await chat.open()
        await service.start()
        await bus.flush(PATIENCE_S)
        yield api
    finally:
        never_lost = bus.steady_for() == float("inf")
        await service.drain(drain_s)
        await chat.close()
        await bus.drain(PATIENCE_S)
    assert never_lost or loses_it, "somebody made the edge lose its connection"
    assert not violations(server.log)


@asynccontextmanager
async def caller(server: AccountServer, user: str) -> AsyncIterator[Client]:
    password = server.passwords.get(user, user)
    inbox = "_INBOX.operator" if user == "plain" else f"_INBOX.{user}"
    client = await nats.connect(server.url, user=user, password=password, inbox_prefix=inbox)
    try:
        yield client
    finally:
        await client.close()


class Call:
    """One request and what comes back."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.inbox = client.new_inbox()
        self.got: list[Msg] = []

    async def send(self, headers: dict[str, str] | None = None, **body: Any) -> Call:
        async def keep(msg: Msg) -> None:
            self.got.append(msg)

        self.subscription = await self._client.subscribe(self.inbox, cb=keep)
        content = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body}
        await self._client.publish(CHAT, json.dumps(content).encode(), reply=self.inbox, headers=headers)
        await self._client.flush(int(PATIENCE_S))
        return self

    async def stream(self) -> list[dict[str, Any]]:
        """The chunks, up to the empty message."""
        await until(lambda: self.got and not self.got[-1].data)
        return [json.loads(msg.data) for msg in self.got[:-1]]

    async def one(self) -> dict[str, Any]:
        await until(lambda: self.got)
        return dict(json.loads(self.got[0].data))

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.got[0].headers or {})


class Stranger:
    """A connection that says what no client library would: its bytes go to the server as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def publish(self, subject: bytes, head: bytes, data: bytes, reply: bytes = b"") -> None:
        """`head`: the header block, however it looks; none when it is empty."""
        sizes = b"%d %d" % (len(head), len(head) + len(data)) if head else b"%d" % len(data)
        self._writer.write(b"%b %b %b %b\r\n%b%b\r\n" % (b"HPUB" if head else b"PUB", subject, reply, sizes, head, data))

    def listen(self, subject: bytes) -> None:
        self._writer.write(b"SUB %b 1\r\n" % subject)

    async def flushed(self) -> bytes:
        """What the server said until it had read all of this."""
        self._writer.write(b"PING\r\n")
        return await self.until(b"PONG\r\n")

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(end)


@asynccontextmanager
async def stranger(server: AccountServer, user: str) -> AsyncIterator[Stranger]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.plan.port)
    login = {"verbose": False, "headers": True, "no_responders": True, "user": user, "pass": user}
    writer.write(f"CONNECT {json.dumps(login)}\r\n".encode())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await reader.readline()  # INFO
        yield Stranger(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()
