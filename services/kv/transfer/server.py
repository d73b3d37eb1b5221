"""Serves offered KV blocks over sockets, and gives readers access to the pool's memory where there is a way.

Owns: the listening sockets and one task a connection. Must not know: who reads, or why. Invariant: bytes are sent only while
their offer is open; the end of an offer cuts a connection that still sends, and the end of a connection ends its offer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable

from schemas.errors import UnreadableMessage
from schemas.handoff import Ticket
from schemas.transfer import Attach, Attached, Carrier, Fetch, FetchAnswer, Keep, Opening, RefusalReason, Released
from services.clock import Clock
from services.kv.holders import Holder
from services.kv.pool import BlockPool
from services.kv.transfer import local
from services.kv.transfer.checksums import send_checksums
from services.kv.transfer.interface import DEFAULT_LIMITS, FetchDenied, OnDone, TransferLimits
from services.kv.transfer.nixl_agent import NixlAgent
from services.kv.transfer.offers import Offer, OfferBook
from services.kv.transfer.patience import within
from services.kv.transfer.stream import send_blocks
from services.kv.transfer.wire import advertised, receive_frame, send_frame, tune, until_closed

_log = logging.getLogger(__name__)


class SocketTransferServer:
    """A `TransferServer`. `start` before `offer`. It always streams; `share` and `lend` let readers take the bytes themselves."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        clock: Clock,
        limits: TransferLimits = DEFAULT_LIMITS,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.counts: dict[str, int] = {}
        self._pool = pool
        self._limits = limits
        self._book = OfferBook(pool, clock, limits, random_bytes, self._cut, self.counts)
        self._address = ""
        self._local = ""
        self._agent: NixlAgent | None = None
        self._attachable: dict[Carrier, Attached] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()  # accepting, watching
        self._connections: set[asyncio.Task[None]] = set()
        self._sending: dict[Offer, socket.socket] = {}

    async def start(self, host: str, port: int, *, advertise: str = "") -> None:
        """Listen on `host`:`port` (0 = any free port). Tickets name `advertise` instead: a host, which gets the bound
        port, or host:port where the port is mapped. Raises OSError when the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=self._limits.connections)
        self._address = advertised(advertise or host, listener.getsockname()[1])
        self._listen(listener)
        self._tasks.add(asyncio.create_task(self._book.watch()))

    async def share(self) -> bool:
        """Let processes of this host and user map the pool's memory, read-only. False: not here, or this memory is private."""
        if self._pool.fd is None:
            return False
        try:
            listener, self._local = local.listen(self._limits.connections)
        except OSError as error:
            _log.info("KV transfer: no shared memory: %s", error)
            return False
        self._attachable[Carrier.MAPPED] = Attached(size=self._pool.memory.nbytes)
        self._listen(listener)
        return True

    async def lend(self, agent: NixlAgent) -> None:
        """Let readers anywhere read the pool's memory through NIXL. Raises NixlError."""
        self._agent = agent  # what it lent ends with it
        metadata, base = await agent.lend(self._pool.memory)
        self._attachable[Carrier.NIXL] = Attached(size=self._pool.memory.nbytes, agent=metadata, base=base)

    @property
    def address(self) -> str:
        return self._address

    def offer(self, holder: Holder, *, kv_compat: str, on_done: OnDone) -> Ticket:
        offer = self._book.open(holder, kv_compat, on_done)
        return Ticket(
            address=self._address,
            token=offer.token,
            expires_s=self._limits.present_s,
            local=self._local,
            nixl=Carrier.NIXL in self._attachable,
        )

    def revoke(self, holder: Holder) -> bool:
        return self._book.revoke(holder)

    async def close(self) -> None:
        self._book.lose_all()
        tasks = self._tasks | self._connections
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._tasks.add(asyncio.create_task(self._accept(listener)))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or a peer that left the backlog: the next one may do better
                _log.warning("KV transfer: accept failed: %s", error)
                await asyncio.sleep(self._limits.renew_s)
                continue
            is_stranger = sock.family == socket.AF_UNIX and not local.same_user(sock)
            if is_stranger or len(self._connections) >= self._limits.connections:
                self._count("turned_away")
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, whatever the peer does. Its socket is closed when this ends."""
        with sock:
            try:
                tune(sock)
                async with within(self._limits.first_frame_s):
                    first: Opening = await receive_frame(sock, Opening)
                if isinstance(first, Attach):
                    await self._attach(sock, first)
                else:
                    async with within(self._limits.connection_s):
                        await self._fetch(sock, first)
            except* UnreadableMessage as errors:
                self._count("garbage")
                _log.warning("KV transfer: unreadable frame: %s", errors.exceptions[0])
            except* OSError as errors:  # the peer left, or took longer than it may (TimeoutError)
                self._count("broken")
                _log.info("KV transfer: connection ended: %r", errors.exceptions[0])

    async def _attach(self, sock: socket.socket, attach: Attach) -> None:
        """Access for as long as both ends live."""
        is_mapped = attach.carrier is Carrier.MAPPED
        try:
            self._book.admit(attach.token)
            attached = self._attachable.get(attach.carrier)
            if attached is None or (is_mapped and sock.family != socket.AF_UNIX):
                raise FetchDenied(RefusalReason.CARRIER)
        except FetchDenied as denied:
            await send_frame(sock, Attached(refused=denied.reason))
            return
        await send_frame(sock, attached)
        if is_mapped and self._pool.fd is not None:
            local.send_descriptor(sock, self._pool.fd)
        self._count("attached")
        await until_closed(sock)

    async def _fetch(self, sock: socket.socket, fetch: Fetch) -> None:
        try:
            offer = self._book.present(fetch.token, fetch.kv_compat, fetch.blocks)
        except FetchDenied as denied:
            await send_frame(sock, FetchAnswer(refused=denied.reason))
            return
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._send(sock, offer, fetch))
                await self._keep_until_done(sock, offer)
            await send_frame(sock, Released(ok=self._book.release(offer)))
        finally:
            self._book.lose(offer)

    async def _send(self, sock: socket.socket, offer: Offer, fetch: Fetch) -> None:
        def check_open() -> None:
            if not self._book.is_open(offer):
                raise ConnectionAbortedError("the offer ended while its blocks were on their way")

        slots = [slot for slot, _ in fetch.blocks]
        self._sending[offer] = sock
        try:
            await self._pool.stage_out(slots)
            await send_frame(sock, FetchAnswer(block_bytes=self._pool.block_bytes))
            send = send_blocks if fetch.carrier is Carrier.STREAM else send_checksums
            await send(sock, self._pool, slots, check_open)
        finally:
            self._sending.pop(offer, None)

    async def _keep_until_done(self, sock: socket.socket, offer: Offer) -> None:
        while not (await receive_frame(sock, Keep)).done:
            self._book.renew(offer)

    def _cut(self, offer: Offer) -> None:
        """The offer ended: its blocks may be given out anew, so not one more byte of them leaves."""
        sock = self._sending.get(offer)
        if sock is not None:
            with contextlib.suppress(OSError):  # the peer was faster
                sock.shutdown(socket.SHUT_RDWR)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
