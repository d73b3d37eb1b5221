"""The bus over NATS: one connection of one process, its inbox for answers, and how long it has been up or down.

Knows what nats-py and the server get wrong together (see `nats_client`) and hides it behind `interface.Bus`. Must not
know what a payload means. Invariant: after `Disconnected` or `MessageTooLarge` nothing was sent and nothing will be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from schemas.errors import BusUnavailable, Disconnected, NoResponders, RequestTimeout
from services.bus.dialect import Dialect
from services.bus.interface import Handler, Msg
from services.bus.nats_client import RECONNECT_EVERY, Client
from services.bus.uptime import Uptime
from services.clock import Clock, SystemClock
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

PING_EVERY = 1.0
"""Seconds. A server that was not heard for two to three of them hangs, or cannot be reached: another one is looked for."""

CLOSE_WITHIN = 2.0

_ERROR_KINDS = {
    "permissions": "permissions violation",
    "authorization": "auth",
    "stale": "stale connection",
    "payload": "maximum payload",
}

_log = logging.getLogger("headrace.bus")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of the server's configuration."""

    user: str
    password: str = field(repr=False)


class NatsBus:
    """`interface.Bus` over one NATS connection. Made by `connect`."""

    def __init__(self, process: str, inbox_prefix: str, clock: Clock, random: Random, metrics: Metrics, dialect: Dialect) -> None:
        self.process = process
        self.dialect = dialect
        self._metrics = metrics
        self._inbox = f"{inbox_prefix}."
        self._client = Client(random, self._went_down, self._came_up, self._server_error, AtMost(clock.monotonic))
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._inboxes = 0
        self._uptime = Uptime(clock)
        self.last_error = ""
        """The latest complaint of the server or the socket, for a status page."""

    @property
    def connected(self) -> bool:
        return not self._uptime.down and self._client.is_connected

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    def down_for(self) -> float:
        return self._uptime.down_for()

    def steady_for(self) -> float:
        return self._uptime.steady_for()

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"{self._inbox}{self._inboxes}"

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._client.publish_now(subject, data, reply, headers)

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Mapping[str, str] | None = None) -> Msg:
        inbox = self.new_inbox()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        self._waiting[inbox] = answer
        timer = loop.call_later(timeout, _give_up, answer, f"no answer on {subject} in {timeout} s")
        try:
            self._client.publish_now(subject, data, inbox, headers)
            msg = await answer
        finally:
            timer.cancel()
            del self._waiting[inbox]
        if msg.no_responders:
            raise NoResponders(f"nobody listens on {subject}")
        return msg

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        return _Subscription(self._client, self._client.subscribe_now(subject, queue, handler))

    async def flush(self, timeout: float) -> None:
        if not self.connected:
            raise Disconnected("the connection to NATS is down")
        if not await self._client.barrier(timeout):
            raise RequestTimeout(f"NATS did not answer a ping in {timeout} s")

    async def drain(self, timeout: float) -> None:
        if self.connected:
            self._client.quiesce()
            try:
                await self.flush(timeout)
            except (RequestTimeout, Disconnected) as error:
                _log.warning("closing before all was sent", extra=fields(error=error))
        await self.close()

    async def close(self) -> None:
        self._uptime.went_down()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Disconnected("the bus was closed"))
        await self._client.shutdown(CLOSE_WITHIN)

    async def _open(self, servers: Sequence[str], timeout: float, credentials: Credentials | None, ping_interval: float) -> None:
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            self.last_error = str(error) or type(error).__name__
            if "authorization" in self.last_error.lower() and not refused.done():
                refused.set_result(self.last_error)

        connecting = asyncio.create_task(
            self._client.connect(
                servers=list(servers),
                name=self.process,
                user=credentials.user if credentials else None,
                password=credentials.password if credentials else None,
                error_cb=on_error,
                connect_timeout=2,
                reconnect_time_wait=RECONNECT_EVERY,  # type: ignore[arg-type]  # only ever slept and added
                max_reconnect_attempts=-1,
                ping_interval=ping_interval,  # type: ignore[arg-type]  # only ever slept
                max_outstanding_pings=2,
                pending_size=-1,
            )
        )
        try:
            waited: set[asyncio.Future[Any]] = {connecting, refused}
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise BusUnavailable(
                    f"NATS refused the credentials of {credentials.user if credentials else 'nobody'!r}"
                    if refused.done()
                    else f"no NATS at {_hosts(servers)} within {timeout:g} s: {self.last_error or 'no answer'}"
                )
            await connecting
            self._client.subscribe_now(f"{self._inbox}*", "", self._answered)
        except BaseException:
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=1.0)
            await self.close()
            raise

    def _answered(self, msg: Msg) -> None:
        answer = self._waiting.get(msg.subject)
        if answer is not None and not answer.done():
            answer.set_result(msg)

    def _went_down(self) -> None:
        if not self._uptime.down:
            self._uptime.went_down()
            _log.warning("the connection to NATS is lost", extra=fields(error=self.last_error))

    def _came_up(self) -> None:
        _log.info("the connection to NATS is back", extra=fields(after=f"{self.down_for():.3f}s"))
        self._uptime.came_up()
        self.dialect.restart()
        self._metrics.bus_reconnects.add(1)

    def _server_error(self, text: str) -> None:
        self.last_error = text
        kind = next((kind for kind, marker in _ERROR_KINDS.items() if marker in text), "other")
        self._metrics.bus_errors.add(1, {"kind": kind})
        _log.error("NATS complains", extra=fields(error=text))


def _give_up(answer: asyncio.Future[Msg], text: str) -> None:
    if not answer.done():
        answer.set_exception(RequestTimeout(text))


@dataclass(slots=True)
class _Subscription:
    _client: Client
    _sid: int

    async def unsubscribe(self) -> None:
        self._client.unsubscribe_now(self._sid)

    async def drain(self, timeout: float) -> None:
        if self._client.is_connected:
            self._client.quiesce(self._sid)
            await self._client.barrier(timeout)
        self._client.forget(self._sid)


async def connect(
    servers: str | Sequence[str],
    process: str,
    role: str,
    *,
    credentials: Credentials | None = None,
    timeout: float = 5.0,
    ping_interval: float = PING_EVERY,
    clock: Clock | None = None,
    random: Random | None = None,
    metrics: Metrics | None = None,
    dialect: Dialect | None = None,
) -> NatsBus:
    """A connected bus whose inbox is `_INBOX.<role>.<process>.*`. Without a `dialect` it writes the newest schema version.

    Raises `BusUnavailable` when no server lets us in within `timeout` seconds; at once when it refuses the credentials.
    """
    bus = NatsBus(
        process,
        f"_INBOX.{role}.{process}",
        clock or SystemClock(),
        random or Random(),
        metrics or Metrics.null(),
        dialect or Dialect(),
    )
    await bus._open([servers] if isinstance(servers, str) else servers, timeout, credentials, ping_interval)
    return bus


def _hosts(servers: Sequence[str]) -> str:
    """The servers without what a URL may hold of credentials."""
    return ", ".join(server.rpartition("@")[2].rpartition("//")[2] for server in servers)
