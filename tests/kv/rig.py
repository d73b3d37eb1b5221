"""Two pools and a transfer between them, on a clock that a test moves; and a proxy that spoils the bytes on the way."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Literal

import pytest

from schemas.handoff import BlockRef, Ticket
from services.clock import ManualClock
from services.kv import memory
from services.kv.holders import HandoffHolder, Holder, RunHolder
from services.kv.pool import BlockPool
from services.kv.transfer.auto import TransferKind, open_carriers, transfer_client
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import Outcome, TransferClient, TransferLimits, TransferServer
from services.kv.transfer.memory import MemoryTransferClient, MemoryTransferServer
from services.kv.transfer.nixl_agent import NixlAgent, installed
from services.kv.transfer.reader import Reader
from services.kv.transfer.server import SocketTransferServer
from tests.waiting import PATIENCE_S

COMPAT = "kv-compat"
FAST = TransferLimits(renew_s=0.01, first_frame_s=PATIENCE_S)  # leases run on the ManualClock, renewals on the loop's
FROZEN = TransferLimits(renew_s=1_000.0)  # a peer that never renews
BLOCKS = 32
needs_nixl = pytest.mark.skipif(not installed(), reason="nixl-cu12 is not installed")
Carrier = TransferKind | Literal["memory"]


@cache
def nixl_agents() -> tuple[NixlAgent, NixlAgent]:
    """One that lends, one that reads, for all tests: loading takes a second."""
    return NixlAgent(), NixlAgent()


class Rig:
    """`prefill` offers from its pool, `decode` fetches into its own. Contents are random, slots scattered."""

    server: TransferServer
    client: TransferClient
    frozen: TransferClient

    def __init__(self, block_bytes: int) -> None:
        self.clock = ManualClock()
        self.prefill, self.decode = (_pool(block_bytes) for _ in range(2))
        self.ended: list[tuple[Holder, Outcome]] = []
        self.random = random.Random(7)

    def on_done(self, holder: Holder, outcome: Outcome) -> None:
        self.ended.append((holder, outcome))

    def fill(self, run: int, n: int) -> HandoffHolder:
        """A run's `n` blocks full of random bytes, handed to its HandoffHolder."""
        holder = HandoffHolder(run)
        for block in self.prefill.allocate(RunHolder(run), n):
            self.prefill.view(block)[:] = self.random.randbytes(self.prefill.block_bytes)
        self.prefill.transfer(RunHolder(run), holder, expires=self.clock.now + 1.0)
        return holder

    def offer(self, run: int, n: int) -> tuple[Ticket, list[BlockRef]]:
        holder = self.fill(run, n)
        ticket = self.server.offer(holder, kv_compat=COMPAT, on_done=self.on_done)
        return ticket, [BlockRef(slot=b, generation=self.prefill.generation(b)) for b in self.prefill.blocks(holder)]

    def room(self, run: int, n: int) -> list[memoryview]:
        return [self.decode.view(block) for block in self.decode.allocate(RunHolder(run), n)]

    def contents(self, blocks: Sequence[BlockRef]) -> list[bytes]:
        return [bytes(self.prefill.view(block.slot)) for block in blocks]

    def check_baseline(self) -> None:
        """Nothing is held on the offering side, and both ledgers are sound."""
        assert self.prefill.held == 0
        self.prefill.check_integrity()
        self.decode.check_integrity()


def _pool(block_bytes: int) -> BlockPool:
    own = memory.allocate(BLOCKS * block_bytes)
    pool = BlockPool(BLOCKS, block_bytes=block_bytes, memory=own.view, fd=own.fd)
    # Churn, so that the next blocks lie in no order and have generations that differ.
    order = list(range(BLOCKS))
    random.Random(block_bytes).shuffle(order)
    for turn in range(2):
        pool.allocate(RunHolder(turn), BLOCKS >> turn)
        for block in order:
            if block in pool.blocks(RunHolder(turn)):
                pool.give_back(RunHolder(turn), [block])
        pool.release(RunHolder(turn))
    return pool


@asynccontextmanager
async def rig(carrier: Carrier, *, block_bytes: int = 4096, limits: TransferLimits = FAST) -> AsyncIterator[Rig]:
    made = Rig(block_bytes)
    if carrier != "memory":
        server = SocketTransferServer(made.prefill, clock=made.clock, limits=limits)
        await server.start("127.0.0.1", 0)
        lending, reading = nixl_agents() if carrier == "nixl" else (None, None)
        await open_carriers(server, carrier, lending)
        made.server = server
        made.client, made.frozen = (transfer_client(carrier, reading, each) for each in (limits, FROZEN))
    else:
        network: dict[str, MemoryTransferServer] = {}
        fake = MemoryTransferServer(made.prefill, network, "p1:0", clock=made.clock, limits=limits)
        await fake.start()
        made.server = fake
        made.client = MemoryTransferClient(network, limits=limits)
        made.frozen = MemoryTransferClient(network, limits=FROZEN)
    try:
        yield made
    finally:
        for client in (made.client, made.frozen):
            if isinstance(client, SocketTransferClient):
                client.close()
        async with asyncio.timeout(PATIENCE_S):
            await made.server.close()


class Pausing:
    """A `Reader` that waits, granted, until it is told to go on."""

    def __init__(self, reader: Reader) -> None:
        self.carrier, self.open, self.close = reader.carrier, reader.open, reader.close
        self._reader = reader
        self.granted, self.go = asyncio.Event(), asyncio.Event()

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        self.granted.set()
        await self.go.wait()
        await self._reader.receive(sock, ticket, block_bytes, blocks, into)


class Proxy:
    """Forwards everything to the server, and from it `budget` bytes; then it stalls, or closes. Flips a bit of byte `flip`."""

    def __init__(self, target: str, *, budget: int = 1 << 40, close: bool = False, flip: int = -1) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._budget = budget
        self._close = close
        self._flip = flip
        self.forwarded = 0
        self.client_left = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        down = asyncio.create_task(self._down(up_reader, writer))
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                up_writer.write(data)
        self.client_left.set()
        down.cancel()
        for end in (up_writer, writer):
            end.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := bytearray(await reader.read(min(65536, self._budget - self.forwarded))):
            if 0 <= self._flip - self.forwarded < len(data):
                data[self._flip - self.forwarded] ^= 0x10
            self.forwarded += len(data)
            writer.write(data)
            await writer.drain()
        if self._close or reader.at_eof():
            writer.close()
