"""What a process may do with the bus: publish, request, subscribe. Nothing here knows NATS or what a payload means.

Two implementations stand behind it: `nats_bus.NatsBus` and, for tests and simulations, `memory.MemoryBus`.
`tests/bus/test_conformance.py` holds both to it.

Invariant: nothing is ever sent later than it was asked for. While the connection is down a publish raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from services.bus.dialect import Dialect

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Msg:
    """One message as it came. `reply` is empty when nobody waits for an answer; `headers` keys are as they were sent.

    A plain class with slots, not a frozen dataclass: one is made per message on the token path.
    """

    __slots__ = ("data", "headers", "reply", "subject")

    def __init__(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.subject = subject
        self.data = data
        self.reply = reply
        self.headers = headers

    def __repr__(self) -> str:
        return f"Msg({self.subject!r}, {len(self.data)} bytes, reply={self.reply!r}, headers={dict(self.headers)!r})"

    @property
    def no_responders(self) -> bool:
        """True for the server's notice that nobody listened: empty, status 503. It is not an answer."""
        return not self.data and self.headers.get("Status") == "503"


Handler = Callable[[Msg], None]
"""Runs on the event loop, one message of a subscription after another, and is never awaited: it validates and
dispatches (a task of its own for anything that waits). An exception is logged; the subscription goes on."""


class Subscription(Protocol):
    """Interest in a subject."""

    async def unsubscribe(self) -> None:
        """No message reaches the handler after this returns. Safe to call twice, and while disconnected."""
        ...

    async def drain(self, timeout: float) -> None:
        """Ask for no more; what was already on its way still reaches the handler, for at most `timeout` seconds."""
        ...


class Bus(Protocol):
    """One connection of one process.

    Subjects given to `publish` and `request` hold no wildcard; those given to `subscribe` may (`*` one token, `>` the
    rest). Order is kept per connection and subject only; a queue group has none.
    """

    @property
    def process(self) -> str:
        """Our own process id; also the connection's name."""
        ...

    @property
    def dialect(self) -> Dialect:
        """Which schema versions are read and written on this connection."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def max_payload(self) -> int:
        """Most bytes of payload and headers together that one message may have."""
        ...

    def down_for(self) -> float:
        """Seconds our own connection has been down; 0.0 while it is up. Bus timers stand still then."""
        ...

    def steady_for(self) -> float:
        """Seconds since the connection came back; infinite when it was never lost; 0.0 while it is down."""
        ...

    def new_inbox(self) -> str:
        """A fresh subject that this connection may listen on and its peers may answer to."""
        ...

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Send and forget, at most once. Costs microseconds and never waits.

        Raises `Disconnected` (nothing was sent, nothing will be), `MessageTooLarge` or `IllegalSubject`.
        """
        ...

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Mapping[str, str] | None = None) -> Msg:
        """The first answer. Raises `NoResponders` (at once), `RequestTimeout`, `Disconnected`, `MessageTooLarge`."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for each message from now on, also after reconnects. `queue`: one of the group gets it.

        Raises `Disconnected` when the connection is down or closed.
        """
        ...

    async def flush(self, timeout: float) -> None:
        """Everything published or subscribed so far has reached the server. Raises `RequestTimeout`, `Disconnected`."""
        ...

    async def drain(self, timeout: float) -> None:
        """Stop hearing, hand over what already came, send what is published, then close; after `timeout` close anyway.

        Tasks that handlers started are their owner's to wait for, before this.
        """
        ...

    async def close(self) -> None:
        """Close at once. Safe to call twice."""
        ...
