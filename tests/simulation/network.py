"""What lies between the processes: delay, loss, doubles, disorder, cut links.

Owns the fate of each message on the in-memory bus (`MemoryBroker.deliver`), and the trace of what arrived. Invariant: messages
from one connection to another keep their order, unless the weather says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

import xxhash

from services.bus.interface import Msg
from services.bus.memory import Delivery, MemoryBroker, MemoryBus
from tests.simulation.loop import Process, VirtualLoop


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities by message; `spike` is a delay of up to `spike_s` seconds."""

    loss: float = 0.0
    double: float = 0.0
    disorder: float = 0.0
    spike: float = 0.0
    spike_s: float = 0.0

    @property
    def calm(self) -> bool:
        return not (self.loss or self.double or self.disorder or self.spike)


CALM = Weather()
FASTEST_S, SLOWEST_S = 0.0002, 0.002
ADVICE_S = 0.005


class State(Enum):
    OPEN = "open"
    HELD = "held"
    """Packets do not pass; TCP sends them again when they do: everything arrives late."""
    CUT = "cut"
    """Packets do not pass, and the connection will not survive it: everything is lost."""


@dataclass(slots=True, eq=False)
class Link:
    """One process's way to everybody else. `since`: when its state changed last."""

    process: Process
    bus: MemoryBus
    state: State = State.OPEN
    since: float = 0.0
    held: list[Delivery] = field(default_factory=list)


class Network:
    """`on_arrival` sees each delivery just before its handler does."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.broker = MemoryBroker(random=Random(random.getrandbits(64)))
        self.broker.deliver = self._deliver
        self.weather = CALM
        self.weather_since = 0.0
        self.arrived = 0
        self.on_arrival: Callable[[Delivery], None] | None = None
        self.log: list[str] | None = None
        """Every arrival in words, when asked for."""
        self._random = random
        self._links: dict[str, Link] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._trace = xxhash.xxh3_64()

    @property
    def trace(self) -> int:
        """A hash of everything that arrived: when, from whom, where, what."""
        return self._trace.intdigest()

    def join(self, process: Process, bus: MemoryBus) -> Link:
        link = self._links[process.id] = Link(process, bus)
        return link

    def link(self, process: str) -> Link:
        return self._links[process]

    def latency(self) -> float:
        """Seconds one way, now."""
        if self.weather.spike and self._random.random() < self.weather.spike:
            return self._random.uniform(FASTEST_S, self.weather.spike_s)
        return self._random.uniform(FASTEST_S, SLOWEST_S)

    def note(self, what: str) -> None:
        """Something happened that is no message."""
        self._trace.update(f"{self.loop.time()!r} {what}".encode())
        if self.log is not None:
            self.log.append(f"{self.loop.time():9.4f} -- {what}")

    # faults

    def change(self, weather: Weather) -> None:
        self.weather = weather
        self.weather_since = self.loop.time()

    def cut(self, process: str, state: State) -> None:
        link = self._links[process]
        link.state, link.since = state, self.loop.time()

    def heal(self, process: str) -> None:
        """The link passes again; what was held arrives, unless its connection ended meanwhile."""
        link = self._links[process]
        held, link.held = link.held, []
        link.state, link.since = State.OPEN, self.loop.time()
        for delivery in held:
            self._deliver(delivery)

    def drop(self, process: str) -> None:
        """The connection ends, and both ends know it. What is on its way is lost."""
        link = self._links[process]
        link.held.clear()
        link.since = self.loop.time()
        link.bus.disconnect()

    def restore(self, process: str) -> None:
        link = self._links[process]
        link.since = self.loop.time()
        if not link.process.dead:
            link.bus.reconnect()

    # messages

    def advise(self, subject: str, data: bytes) -> None:
        """What the server itself says: to whoever listens and is connected, whatever the weather."""
        for target in self.broker.listeners(subject):
            link = self._links[target.bus.process]
            if link.state is State.OPEN:
                delivery = Delivery("server", target, Msg(subject, data), target.bus.epoch)
                self.loop.call_at(self.loop.time() + ADVICE_S, self._arrive, delivery, context=link.process.context)

    def _deliver(self, delivery: Delivery) -> None:
        sender, target = self._links.get(delivery.sender), self._links[delivery.target.bus.process]
        for link in (sender, target):
            if link is None or link.state is State.CUT:
                return
            if link.state is State.HELD:
                link.held.append(delivery)
                return
        weather, random = self.weather, self._random
        if weather.calm:
            self._send(delivery, target.process)
            return
        if random.random() < weather.loss:
            self.note(f"lost {delivery.sender} {delivery.msg.subject}")
            return
        in_order = random.random() >= weather.disorder
        self._send(delivery, target.process, in_order=in_order)
        if random.random() < weather.double:
            self._send(delivery, target.process)

    def _send(self, delivery: Delivery, to: Process, *, in_order: bool = True) -> None:
        at = self.loop.time() + self.latency()
        if in_order:
            key = (delivery.sender, to.id)
            at = self._last[key] = max(at, self._last.get(key, 0.0) + 1e-6)
        self.loop.call_at(at, self._arrive, delivery, context=to.context)

    def _arrive(self, delivery: Delivery) -> None:
        if delivery.target.bus.epoch != delivery.epoch:
            return  # it does not outlive the connection
        msg, self.arrived = delivery.msg, self.arrived + 1
        where = f"{self.loop.time()!r} {delivery.sender} {delivery.target.bus.process} {msg.subject} {msg.reply} "
        self._trace.update(where.encode())
        self._trace.update(msg.data)
        if self.log is not None:
            self.log.append(describe(self.loop.time(), delivery))
        if self.on_arrival is not None:
            self.on_arrival(delivery)
        delivery()


def describe(now: float, delivery: Delivery) -> str:
    from tests.simulation.words import words

    msg = delivery.msg
    return f"{now:9.4f} {delivery.sender[:-9]} > {delivery.target.bus.process[:-9]} {msg.subject} {words(msg)}"
