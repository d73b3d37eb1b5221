"""Serves offered KV blocks over TCP, straight out of pool memory.

Owns: the listening socket and one task a connection. Must not know: who reads, or why. Invariant: bytes are sent only while their
offer is open; the end of an offer cuts a connection that still sends, and the end of a connection ends its offer.
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
from schemas.transfer import Fetch, FetchAnswer, Keep, Released
from services.clock import Clock
from services.kv.holders import Holder
from services.kv.pool import BlockPool
from services.kv.transfer.interface import DEFAULT_LIMITS, FetchDenied, OnDone, TransferLimits
from services.kv.transfer.offers import Offer, OfferBook
from services.kv.transfer.wire import CHECKSUM_BYTES, advertised, receive_frame, send_frame, tune

_log = logging.getLogger(__name__)


class TcpTransferServer:
    """A `TransferServer`. `start` before `offer`."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        clock: Clock,
        on_done: OnDone,
        limits: TransferLimits = DEFAULT_LIMITS,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.counts: dict[str, int] = {}
        self._pool = pool
        self._limits = limits
        self._book = OfferBook(pool, clock, limits, random_bytes, on_done, self._cut, self.counts)
        self._address = ""
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # accepting, watching
        self._connections: set[asyncio.Task[None]] = set()
        self._sending: dict[Offer, socket.socket] = {}

    async def start(self, host: str, port: int, *, advertise: str = "") -> None:
        """Listen on `host`:`port` (0 = any free port). Tickets name `advertise` instead: a host, which gets the bound
        port, or host:port where the port is mapped. Raises OSError when the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=self._limits.connections)
        self._listener.setblocking(False)
        self._address = advertised(advertise or host, self._listener.getsockname()[1])
        self._tasks = {asyncio.create_task(self._accept(self._listener)), asyncio.create_task(self._book.watch())}

    @property
    def address(self) -> str:
        return self._address

    def offer(self, holder: Holder, *, kv_compat: str) -> Ticket:
        offer = self._book.open(holder, kv_compat)
        return Ticket(address=self._address, token=offer.token, expires_s=self._limits.present_s)

    def revoke(self, holder: Holder) -> bool:
        return self._book.revoke(holder)

    async def close(self) -> None:
        self._book.lose_all()
        tasks = self._tasks | self._connections
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or a peer that left the backlog: the next one may do better
                _log.warning("KV transfer: accept failed: %s", error)
                await asyncio.sleep(self._limits.renew_s)
                continue
            if len(self._connections) >= self._limits.connections:
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
                async with asyncio.timeout(self._limits.connection_s):
                    await self._converse(sock)
            except* UnreadableMessage as errors:
                self._count("garbage")
                _log.warning("KV transfer: unreadable frame: %s", errors.exceptions[0])
            except* OSError as errors:  # the peer left, or took longer than it may (TimeoutError)
                self._count("broken")
                _log.info("KV transfer: connection ended: %r", errors.exceptions[0])

    async def _converse(self, sock: socket.socket) -> None:
        async with asyncio.timeout(self._limits.first_frame_s):
            fetch = await receive_frame(sock, Fetch)
        try:
            offer = self._book.present(fetch.token, fetch.kv_compat, fetch.blocks)
        except FetchDenied as denied:
            await send_frame(sock, FetchAnswer(refused=denied.reason))
            return
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._send(sock, offer, [slot for slot, _ in fetch.blocks]))
                await self._keep_until_done(sock, offer)
            await send_frame(sock, Released(ok=self._book.release(offer)))
        finally:
            self._book.lose(offer)

    async def _send(self, sock: socket.socket, offer: Offer, slots: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self._sending[offer] = sock
        try:
            await send_frame(sock, FetchAnswer(block_bytes=self._pool.block_bytes))
            for slot in slots:
                if not self._book.is_open(offer):
                    raise ConnectionAbortedError("the offer ended while its blocks were on their way")
                await loop.sock_sendall(sock, self._pool.checksum(slot).to_bytes(CHECKSUM_BYTES, "little"))
                await loop.sock_sendall(sock, self._pool.view(slot))
                await asyncio.sleep(0)  # a peer that reads as fast as we send must not keep the loop from others
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
