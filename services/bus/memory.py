"""A bus in memory, for tests and simulations: same interface, same promises, no sockets.

`MemoryBroker` is the server, `MemoryBus` one process's connection to it. A message is delivered by the event loop after
the call that published it, never inside it; each connection's messages keep their order. `broker.deliver` is the seam
through which a simulation delays, drops or doubles messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from schemas.errors import Disconnected, IllegalSubject, MessageTooLarge, NoResponders, RequestTimeout
from services.bus.dialect import Dialect
from services.bus.interface import NO_HEADERS, Handler, Msg
from services.bus.matching import breaks_framing, is_pattern, matches
from services.bus.uptime import Uptime
from services.clock import Clock, SystemClock
from services.telemetry.logs import fields

MAX_PAYLOAD = 8 * 1024 * 1024
_NOBODY = {"Status": "503", "Description": "No Responders"}
_log = logging.getLogger("headrace.bus")


@dataclass(slots=True, eq=False)
class MemorySubscription:
    """One connection's interest in a subject."""

    bus: MemoryBus
    subject: str
    handler: Handler
    queue: str
    active: bool = True
    prefix: str = field(init=False)
    """What comes before the first wildcard; comparing it first spares most of the matching."""

    def __post_init__(self) -> None:
        self.prefix = self.subject.partition("*")[0].partition(">")[0]

    async def unsubscribe(self) -> None:
        self.active = False
        self.bus.broker.forget(self)

    async def drain(self, timeout: float) -> None:
        self.bus.broker.forget(self)
        await asyncio.sleep(0)  # what is on its way was scheduled before us
        self.active = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message on its way to one subscriber; call it to deliver. `sender` is the publishing process."""

    sender: str
    target: MemorySubscription
    msg: Msg
    epoch: int
    """The target connection's: what is on its way does not outlive the connection."""

    def __call__(self) -> None:
        target = self.target
        if not target.active or target.bus.epoch != self.epoch:
            return
        try:
            target.handler(self.msg)
        except Exception:
            _log.exception("a handler failed", extra=fields(subject=self.msg.subject))


def soon(delivery: Delivery) -> None:
    """The default `broker.deliver`: in order, at the next turn of the event loop."""
    asyncio.get_running_loop().call_soon(delivery)


class MemoryBroker:
    """Who listens to what. `random` picks the member of a queue group."""

    def __init__(self, *, random: Random | None = None, max_payload: int = MAX_PAYLOAD) -> None:
        self.max_payload = max_payload
        self.deliver: Callable[[Delivery], None] = soon
        self._random = random or Random(0)
        self._literal: dict[str, list[MemorySubscription]] = {}
        self._patterns: list[MemorySubscription] = []

    def remember(self, subscription: MemorySubscription) -> None:
        self._list(subscription.subject).append(subscription)

    def forget(self, subscription: MemorySubscription) -> None:
        listeners = self._list(subscription.subject)
        if subscription in listeners:
            listeners.remove(subscription)

    def subscriptions(self, bus: MemoryBus) -> int:
        """How many `bus` has, its inbox included."""
        listed = [self._patterns, *self._literal.values()]
        return sum(subscription.bus is bus for listeners in listed for subscription in listeners)

    def send(self, sender: MemoryBus, msg: Msg) -> None:
        """Route one message; tell the sender when it asked for an answer and nobody listens."""
        targets = self._targets(msg.subject)
        for target in targets:
            self.deliver(Delivery(sender.process, target, msg, target.bus.epoch))
        if not targets and msg.reply:
            notice = Msg(msg.reply, b"", "", _NOBODY)
            for own in self.listeners(msg.reply):
                if own.bus is sender:
                    self.deliver(Delivery(sender.process, own, notice, sender.epoch))

    def _targets(self, subject: str) -> list[MemorySubscription]:
        groups: dict[str, list[MemorySubscription]] = {}
        targets = []
        for listener in self.listeners(subject):
            if listener.queue:
                groups.setdefault(listener.queue, []).append(listener)
            else:
                targets.append(listener)
        return targets + [self._random.choice(members) for members in groups.values()]

    def listeners(self, subject: str) -> list[MemorySubscription]:
        """Every connected subscription that hears `subject`."""
        found = self._literal.get(subject, []) + [
            s for s in self._patterns if subject.startswith(s.prefix) and matches(s.subject, subject)
        ]
        return [listener for listener in found if listener.bus.connected]

    def _list(self, subject: str) -> list[MemorySubscription]:
        return self._patterns if is_pattern(subject) else self._literal.setdefault(subject, [])


class MemoryBus:
    """`interface.Bus` over a broker in memory. `disconnect` and `reconnect` are what a network does to it."""

    def __init__(
        self,
        broker: MemoryBroker,
        process: str,
        *,
        role: str = "test",
        clock: Clock | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.broker = broker
        self.dialect = dialect or Dialect()
        self.process = process
        self.connected = True
        self.epoch = 0
        """Raised at each disconnect."""
        self._uptime = Uptime(clock or SystemClock())
        self._inbox = f"_INBOX.{role}.{process}."
        self._inboxes = 0
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._closed = False
        broker.remember(MemorySubscription(self, f"{self._inbox}*", self._answered, ""))

    @property
    def max_payload(self) -> int:
        return self.broker.max_payload

    def down_for(self) -> float:
        return self._uptime.down_for()

    def steady_for(self) -> float:
        return self._uptime.steady_for()

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"{self._inbox}{self._inboxes}"

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._check_connected()
        if not subject or breaks_framing(subject) or breaks_framing(reply):
            raise IllegalSubject(f"not a subject: {subject!r} or {reply!r}")
        size = len(data) + sum(len(key) + len(value) + 4 for key, value in (headers or {}).items())
        if size > self.max_payload:
            raise MessageTooLarge(f"{size} bytes with headers; the server takes {self.max_payload}")
        self.broker.send(self, Msg(subject, data, reply, dict(headers) if headers else NO_HEADERS))

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Mapping[str, str] | None = None) -> Msg:
        inbox = self.new_inbox()
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = answer
        try:
            self.publish(subject, data, reply=inbox, headers=headers)
            async with asyncio.timeout(timeout):
                msg = await answer
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} in {timeout} s") from None
        finally:
            del self._waiting[inbox]
        if msg.no_responders:
            raise NoResponders(f"nobody listens on {subject}")
        return msg

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> MemorySubscription:
        self._check_connected()
        subscription = MemorySubscription(self, subject, handler, queue)
        self.broker.remember(subscription)
        return subscription

    async def flush(self, timeout: float) -> None:
        self._check_connected()
        await asyncio.sleep(0)

    async def drain(self, timeout: float) -> None:
        if self.connected:
            await self.flush(timeout)
        await self.close()

    async def close(self) -> None:
        self.disconnect()
        self._closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Disconnected("the bus was closed"))

    def disconnect(self) -> None:
        """The network is gone: nothing goes out, nothing comes in, what was on its way here is lost."""
        if self.connected:
            self.connected = False
            self.epoch += 1
            self._uptime.went_down()

    def reconnect(self) -> None:
        """The network is back, and the subscriptions with it."""
        if not self.connected and not self._closed:
            self.connected = True
            self._uptime.came_up()
            self.dialect.restart()

    def _answered(self, msg: Msg) -> None:
        answer = self._waiting.get(msg.subject)
        if answer is not None and not answer.done():
            answer.set_result(msg)

    def _check_connected(self) -> None:
        if not self.connected:
            raise Disconnected("the connection is down")
