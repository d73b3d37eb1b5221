"""KV transfers between simulated processes: the book of offers behind connections that can be slow, silent or lost.

Owns the connections. Each side's part runs in its own process: a paused server serves nothing, a killed one ends its connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from random import Random
from types import TracebackType
from typing import Any, Self

import xxhash

from schemas.handoff import BlockRef, Ticket
from services.clock import Clock
from services.kv.holders import Holder
from services.kv.pool import BlockPool
from services.kv.transfer.interface import DEFAULT_LIMITS, ConnectionLost, CorruptBlock, FetchTimeout, OnDone, TransferError
from services.kv.transfer.offers import Offer, OfferBook
from tests.simulation.loop import Process
from tests.simulation.network import Network, State

_RESEND_S = 0.05


class Wires:
    """All transfer connections of a cluster."""

    def __init__(self, network: Network, random: Random, block_s: float) -> None:
        self.network = network
        self.block_s = block_s
        self.random = random
        self.servers: dict[str, Server] = {}
        self._open: dict[Connection, None] = {}
        self._nobody = copy_context()

    def open(self, client: Process, server: Server) -> Connection:
        connection = Connection(self, client, server)
        self._open[connection] = None
        return connection

    def ended(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def killed(self, process: Process) -> None:
        """The kernel closes its sockets: the other ends read an end of file."""
        for connection in [c for c in self._open if process in (c.client, c.server.process)]:
            connection.broken()

    def break_some(self, share: float) -> None:
        for connection in list(self._open):
            if self.random.random() < share:
                connection.broken()

    def pass_over(self, source: Process, target: Process, call: Callable[[], object]) -> None:
        """`call` runs in `target` after the way there; when a link on it does not pass, TCP sends again until it does."""
        if all(self.network.link(process.id).state is State.OPEN for process in (source, target)):
            self.network.loop.call_later(self.network.latency(), call, context=target.context)
        else:
            self.network.loop.call_later(_RESEND_S, self.pass_over, source, target, call, context=self._nobody)


class Connection:
    """One fetch. `ask` runs something at the server; the offer is lost when the client goes without a word."""

    def __init__(self, wires: Wires, client: Process, server: Server) -> None:
        self.client = client
        self.server = server
        self.offer: Offer | None = None
        self._wires = wires
        self._is_open = True
        self._waiting: set[asyncio.Future[Any]] = set()

    async def ask(self, call: Callable[[], Any]) -> Any:
        """Raises what `call` raises (a TransferError), `ConnectionLost`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def serve() -> None:
            if not self._is_open:
                return
            try:
                result: Any = call()
            except TransferError as error:
                result = error
            self._wires.pass_over(self.server.process, self.client, lambda: _settle(answer, result))

        if not self._is_open:
            raise ConnectionLost("the connection ended")
        self._waiting.add(answer)
        self._wires.pass_over(self.client, self.server.process, serve)
        try:
            async with asyncio.timeout(DEFAULT_LIMITS.lease_s):
                result = await answer
        except TimeoutError:
            raise ConnectionLost("a server that is silent for the length of a lease has lost the offer") from None
        finally:
            self._waiting.discard(answer)
        if isinstance(result, TransferError):
            raise result
        return result

    def tell(self, call: Callable[[Offer], object]) -> None:
        offer = self.offer
        if offer is not None and self._is_open:
            self._wires.pass_over(self.client, self.server.process, lambda: call(offer))

    def close(self) -> None:
        """By the client."""
        self.tell(self.server.book.lose)
        self._end()

    def broken(self) -> None:
        """By neither: both find out, those who live."""
        offer, book = self.offer, self.server.book
        loop = self._wires.network.loop
        if offer is not None:
            loop.call_later(self._wires.network.latency(), book.lose, offer, context=self.server.process.context)
        for answer in self._waiting:
            lost = ConnectionLost("the connection ended early")
            loop.call_later(self._wires.network.latency(), _settle, answer, lost, context=self.client.context)
        self._end()

    def _end(self) -> None:
        self._is_open = False
        self._wires.ended(self)


class Server:
    """A `TransferServer`."""

    def __init__(self, wires: Wires, process: Process, pool: BlockPool, clock: Clock, random: Random) -> None:
        self.counts: dict[str, int] = {}
        self.process = process
        self.pool = pool
        self.book = OfferBook(pool, clock, DEFAULT_LIMITS, random.randbytes, lambda offer: None, self.counts)
        self._wires = wires
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self.process.id

    async def start(self) -> None:
        self._wires.servers[self.address] = self
        self._watching = asyncio.create_task(self.book.watch())

    def offer(self, holder: Holder, *, kv_compat: str, on_done: OnDone) -> Ticket:
        token = self.book.open(holder, kv_compat, on_done).token
        return Ticket(address=self.address, token=token, expires_s=DEFAULT_LIMITS.present_s)

    def revoke(self, holder: Holder) -> bool:
        return self.book.revoke(holder)

    async def close(self) -> None:
        self._wires.servers.pop(self.address, None)
        self._wires.killed(self.process)
        self.book.lose_all()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


class Client:
    """A `TransferClient` of one process."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires = wires
        self._process = process

    async def fetch(
        self, ticket: Ticket, blocks: Sequence[BlockRef], into: Sequence[memoryview], *, kv_compat: str, timeout: float
    ) -> Fetched:
        server = self._wires.servers.get(ticket.address)
        if server is None or server.process.dead:
            raise ConnectionLost("nobody listens there")
        connection = self._wires.open(self._process, server)
        wanted = [(block.slot, block.generation) for block in blocks]
        try:
            async with asyncio.timeout(timeout):
                connection.offer = await connection.ask(lambda: server.book.present(ticket.token, kv_compat, wanted))
                fetched = Fetched(connection)
                try:
                    for block, view in zip(blocks, into, strict=True):
                        await _copy(connection, block.slot, view, self._wires.block_s)
                except BaseException:
                    await fetched.close()
                    raise
                return fetched
        except TimeoutError:
            connection.close()
            raise FetchTimeout(f"no KV blocks within {timeout} s") from None
        except BaseException:
            connection.close()
            raise


class Fetched:
    """A `Fetched`: keeps the lease until `release` or `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keeping = asyncio.create_task(self._keep())

    async def release(self) -> bool:
        offer, book = self._connection.offer, self._connection.server.book
        assert offer is not None
        try:
            async with asyncio.timeout(DEFAULT_LIMITS.release_s):
                ok: bool = await self._connection.ask(lambda: book.release(offer))
                return ok
        except (TimeoutError, TransferError):
            return False
        finally:
            await self.close()

    async def close(self) -> None:
        self._connection.close()
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(DEFAULT_LIMITS.renew_s)
            self._connection.tell(self._connection.server.book.renew)


async def _copy(connection: Connection, slot: int, view: memoryview, block_s: float) -> None:
    book, pool, offer = connection.server.book, connection.server.pool, connection.offer
    assert offer is not None

    def read() -> tuple[bytes, int]:
        if not book.is_open(offer):
            raise ConnectionLost("the offer ended while its blocks were on their way")
        return bytes(pool.view(slot)), pool.checksum(slot)

    await asyncio.sleep(block_s)
    data, checksum = await connection.ask(read)
    view[:] = data
    if xxhash.xxh3_64_intdigest(view) != checksum:
        raise CorruptBlock("a KV block changed after its checksum was taken")


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
