"""Whether callers still listen. NATS says *no responders* only within an account; across accounts it tells so in two ways:

- the system account tells when a connection ends, at once;
- a message with `Nats-Trace-Dest` is delivered as any other, and its trace lists every hop. One that nobody hears has no hop
  after the first. It needs nats-server 2.11 and `allow_trace` on the export. Never `Nats-Trace-Only`, and never an empty message:
  after either the server forgets the caller's reply subject.

Source: NATS ADR-41; NATS documentation, "System events". Invariant: only what the server says makes a caller gone.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec

from services.bus.interface import Bus, Msg, Subscription
from services.edge.nats_api.origin import Origin

TRACE_EVERY_S = 0.5
DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"
_NUMBER = "Headrace-Trace"
_FIRST_HOP = "in"


class _Hop(msgspec.Struct):
    type: str


class _Request(msgspec.Struct):
    header: dict[str, list[str]]


class _Trace(msgspec.Struct):
    request: _Request
    events: list[_Hop]


class _Server(msgspec.Struct):
    id: str = ""
    name: str = ""


class _Client(msgspec.Struct):
    id: int = 0


class _Disconnect(msgspec.Struct):
    server: _Server
    client: _Client


class Watch:
    """One caller, for as long as its request runs. `gone`: set once nobody listens."""

    def __init__(self, number: str, inbox: str, origin: Origin) -> None:
        self.number = number
        self.origin = origin
        self.gone = asyncio.Event()
        self._trace = {"Nats-Trace-Dest": inbox, _NUMBER: number}
        self._traced = asyncio.get_running_loop().time()

    def headers(self) -> dict[str, str]:
        """For the next message to the caller: now and then it is traced."""
        now = asyncio.get_running_loop().time()
        if now < self._traced + TRACE_EVERY_S:
            return {}
        self._traced = now
        return self._trace


class Presence:
    """The callers of one process; their traces share an inbox."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._numbers = itertools.count(1)
        self._watches: dict[str, Watch] = {}
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Raises `Disconnected`."""
        for subject, handler in ((self._inbox, self._on_trace), (DISCONNECTS, self._on_disconnect)):
            self._subscriptions.append(await self._bus.subscribe(subject, handler))

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def watch(self, origin: Origin) -> Watch:
        """Give it to `forget` at the end."""
        number = str(next(self._numbers))
        watch = self._watches[number] = Watch(number, self._inbox, origin)
        return watch

    def forget(self, watch: Watch) -> None:
        self._watches.pop(watch.number, None)

    def _on_trace(self, msg: Msg) -> None:
        try:
            trace = msgspec.json.decode(msg.data, type=_Trace)
        except msgspec.DecodeError:
            return
        watch = self._watches.get(trace.request.header.get(_NUMBER, [""])[0])
        if watch is not None and all(hop.type == _FIRST_HOP for hop in trace.events):
            watch.gone.set()

    def _on_disconnect(self, msg: Msg) -> None:
        try:
            told = msgspec.json.decode(msg.data, type=_Disconnect)
        except msgspec.DecodeError:
            return
        ended = {(told.server.id, told.client.id), (told.server.name, told.client.id)}
        for watch in self._watches.values():
            if watch.origin.connection in ended:
                watch.gone.set()
