"""nats-py's client with the nine changes Headrace needs; this and `nats_parser` alone touch its private parts.

| change | seam in nats-py 2.16 | why |
|---|---|---|
| publish is a plain call | `_pending*`, `_transport._io_writer` | a coroutine and a flusher task cost more than the message |
| a ping keeps its place in the stream | `_send_ping`, `_pongs` | nats-py writes it ahead of what is pending: no barrier |
| a message goes straight to its handler | `_build_message` | no queue and no task a subscription, so nothing is dropped |
| headers are read to the byte | `_process_headers`, see `nats_headers` | strange ones passed for the server's, or ended reading |
| a whole message is parsed in one go | `_ps`, see `nats_parser` | seven patterns and three coroutines cost more than it |
| whoever sends anything is there | `_pings_outstanding`, in `nats_parser` | a PONG behind a second of messages came too late |
| nothing unsent outlives the connection | `_attempt_reconnect` | nats-py sends it after the reconnect; a stale job would run |
| an error from the server is a reconnect | `_process_err` | nats-py closes for good on almost every `-ERR` |
| a reconnect cannot die | `_attempt_reconnect` | an unforeseen exception would leave it reconnecting for ever |

`tests/bus/test_nats_client.py` fails when nats-py moves one of them. It must not know subjects or message contents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from nats.aio import client as nats_client
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError

from schemas.errors import Disconnected, IllegalSubject, MessageTooLarge
from services.bus.interface import NO_HEADERS, Handler, Msg
from services.bus.matching import breaks_framing
from services.bus.nats_headers import decode_headers, encode_headers
from services.bus.nats_parser import MessageParser
from services.telemetry.logs import AtMost, fields

MAX_CONTROL_LINE = 4_000
"""Bytes of subject and reply subject together; the server closes the connection at 4,096 for the whole line."""
MAX_UNSENT = 32 * 1024 * 1024
"""Bytes that may wait for a server that does not read; more is as good as down."""
SOCKET_FULL = 256 * 1024
"""Bytes in the socket's own buffer above which writing waits."""
RECONNECT_EVERY = 0.1

_log = logging.getLogger("headrace.bus")
_PERMISSIONS = "permissions violation"


class Client(nats_client.Client):
    """One connection. `on_down` and `on_up` run when it is lost and when it is usable again."""

    def __init__(
        self,
        random: Random,
        on_down: Callable[[], None],
        on_up: Callable[[], None],
        on_error: Callable[[str], None],
        may_log: AtMost,
    ) -> None:
        super().__init__()
        self._random = random
        self._on_down = on_down
        self._on_up = on_up
        self._on_server_error = on_error
        self._may_log = may_log
        self._ps = MessageParser(self, self._deliver)
        self._handlers: dict[int, Handler] = {}
        self._usable = True
        self._closing = False
        self._write_scheduled = False

    # outbound

    def publish_now(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Send at the end of this turn of the event loop. Raises `Disconnected`, `MessageTooLarge`, `IllegalSubject`."""
        self._check_connected()
        if self._pending_data_size > MAX_UNSENT:
            raise Disconnected("NATS does not read what is sent to it")
        if not subject or breaks_framing(subject) or breaks_framing(reply):
            raise IllegalSubject(f"not a subject: {subject!r} or {reply!r}")
        if headers:
            head = encode_headers(headers)
            size = len(head) + len(data)
            command = b"%b%b%b\r\n" % (f"HPUB {subject} {reply} {len(head)} {size}\r\n".encode(), head, data)
        else:
            size = len(data)
            command = b"%b%b\r\n" % (f"PUB {subject} {reply} {size}\r\n".encode(), data)
        if size > self._max_payload or len(subject) + len(reply) > MAX_CONTROL_LINE:
            raise MessageTooLarge(f"{size} bytes with headers; the server takes {self._max_payload}")
        self._enqueue(command)

    def subscribe_now(self, subject: str, queue: str, handler: Handler) -> int:
        """Register `handler`, tell the server; nats-py repeats the subscription after a reconnect. Returns its id."""
        self._check_connected()
        if not subject or breaks_framing(subject) or breaks_framing(queue):
            raise ValueError(f"not a subject: {subject!r} or queue group: {queue!r}")
        self._sid += 1
        sid = self._sid
        self._subs[sid] = NatsSubscription(self, sid, subject, queue=queue)
        self._handlers[sid] = handler
        self._enqueue(f"SUB {subject} {queue} {sid}\r\n".encode())
        return sid

    def unsubscribe_now(self, sid: int) -> None:
        """Forget the handler at once; tell the server when there is one."""
        if self.forget(sid) and self._status == nats_client.Client.CONNECTED:
            self._enqueue(f"UNSUB {sid}\r\n".encode())

    def forget(self, sid: int) -> bool:
        """Drop the handler; nothing repeats the subscription after a reconnect. True when it was there."""
        self._handlers.pop(sid, None)
        return self._subs.pop(sid, None) is not None

    def quiesce(self, *sids: int) -> None:
        """End subscriptions (all, when none is named) at the server; the handlers stay for what is on its way."""
        for sid in sids or tuple(self._subs):
            self._enqueue(f"UNSUB {sid}\r\n".encode())

    async def barrier(self, timeout: float) -> bool:
        """True when the server has read all that was sent before, and we all that it had sent by then."""
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        await asyncio.wait({pong}, timeout=timeout)  # never cancelled: a late PONG for a cancelled future ends reading
        return pong.done()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._enqueue(b"PING\r\n")

    def _check_connected(self) -> None:
        # nats-py is CONNECTED before it has repeated the subscriptions; an answer sent then would be lost.
        if self._status != nats_client.Client.CONNECTED or not self._usable:
            raise Disconnected("the connection to NATS is down")

    def _enqueue(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._write_scheduled:
            self._write_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    def _write_pending(self) -> None:
        """All that one turn of the event loop published, in one write; nats-py's flusher waits for a full socket."""
        self._write_scheduled = False
        if not self._pending or self._status != nats_client.Client.CONNECTED:
            return
        socket = self._socket()
        if socket is not None and not socket.is_closing() and socket.get_write_buffer_size() < SOCKET_FULL:
            socket.writelines(self._pending)
            self._pending = []
            self._pending_data_size = 0
        elif self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _socket(self) -> asyncio.WriteTransport | None:
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        return None if writer is None else writer.transport

    # inbound

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        return decode_headers(headers) if headers else None

    def _build_message(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None) -> Any:
        """Deliver instead of build: nats-py goes no further with a message that was not built."""
        self._deliver(sid, subject, reply, data, headers or NO_HEADERS)
        return None

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            return
        try:
            handler(Msg(subject.decode(), data, reply.decode(), headers))
        except Exception:  # a stranger's subject is among the reasons, and strangers may repeat themselves
            if (held_back := self._may_log()) is not None:
                about = fields(subject=subject.decode("utf-8", "replace"), held_back=held_back)
                _log.exception("a handler failed", extra=about)

    # the connection's life

    async def _process_err(self, err_msg: str) -> None:
        self._on_server_error(err_msg.strip("'"))
        if _PERMISSIONS in err_msg:
            return  # the server keeps the connection
        await self._process_op_err(NatsError(f"nats: {err_msg}"))

    async def _attempt_reconnect(self) -> None:
        self._usable = False
        self._on_down()
        while not (self.is_closed or self._closing):
            self.abort()
            self.options["reconnect_time_wait"] = RECONNECT_EVERY * self._random.uniform(0.5, 1.5)
            await asyncio.sleep(RECONNECT_EVERY * self._random.random())  # a server's clients do not return as one
            try:
                await super()._attempt_reconnect()
            except Exception:
                _log.exception("reconnecting failed in an unforeseen way; again")
                continue
            if self.is_connected and not self._closing:
                self._usable = True
                self._on_up()
            return

    async def shutdown(self, timeout: float) -> None:
        """Close, after any reconnect in progress has ended: nats-py's `close` alone can lose to it and leave it open."""
        self._closing = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        reconnecting = self._reconnection_task
        while reconnecting is not None and not reconnecting.done() and loop.time() < deadline:
            reconnecting.cancel()  # more than once: `wait_for` swallows one that comes as it ends
            await asyncio.wait({reconnecting}, timeout=RECONNECT_EVERY)
        try:
            async with asyncio.timeout_at(deadline):
                await self.close()
        except (TimeoutError, OSError) as error:
            _log.warning("closing without a goodbye", extra=fields(error=error))
        self.abort()
        await asyncio.sleep(0)  # the socket is closed at the loop's next turn

    def abort(self) -> None:
        """Abort the socket with what it buffers (closing would wait for a peer that may never read), forget the rest."""
        self._pending = []
        self._pending_data_size = 0
        socket = self._socket()
        if socket is not None:
            socket.abort()
