"""`hr.v1.chat.completions`: the chat API over NATS. The body is OpenAI's; the tenant is the caller's account, no field of it.

A stream is a message a chunk and an empty one at the end; any other answer is one message. The first message names, in the header
`Headrace-Cancel`, a subject on which any message gives the answer up. Whoever disconnects, or stops listening to a stream, gives
it up too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from schemas.errors import BusError, EdgeUnavailable, HeadraceError, InternalError, PayloadTooLarge, Unavailable
from schemas.subjects import Subjects
from services.bus.interface import Bus, Msg, Subscription
from services.bus.micro import Service
from services.edge.api.begun import Begun
from services.edge.api.body import parse
from services.edge.api.chat import ChatCompletions
from services.edge.api.exchange import Pace
from services.edge.api.gate import Traffic
from services.edge.api.measure import CLIENT_GONE, Measure
from services.edge.api.served import Served
from services.edge.gate.accounts import Accounts
from services.edge.nats_api.origin import Origin, read_origin
from services.edge.nats_api.presence import Presence, Watch
from services.edge.nats_api.writer import NatsWriter
from services.edge.selection.turns import Asking

HINT = "Headrace-Hint"
_LATE_S = 1.0
"""A job that takes too long is ended by its own deadline, and its caller is told."""


class NatsChat:
    """`accounts`: what each account may do."""

    def __init__(
        self, bus: Bus, subjects: Subjects, served: Served, traffic: Traffic, accounts: Accounts, random: Random
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._served = served
        self._traffic = traffic
        self._accounts = accounts
        self._random = random
        self._chat = ChatCompletions(served)
        self._presence = Presence(bus)
        self._pace = Pace.of(served.settings)
        self._watches: dict[str, Watch] = {}
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Raises `Disconnected`."""
        await self._presence.open()
        self._subscription = await self._bus.subscribe(self._subjects.chat_cancel_any(), self._on_cancel)

    async def close(self) -> None:
        await self._presence.close()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def __call__(self, msg: Msg) -> None:
        """One request, to its end. Raises the `HeadraceError` that refused it; the service layer tells the caller."""
        measure = Measure(self._served.metrics, self._served.clock)
        try:
            await self._serve(msg, measure)
        except Exception as error:
            refusal = _refusal(error)
            measure.failed(refusal)
            measure.status = refusal.status
            raise
        finally:
            measure.answered()

    def full(self, refusal: HeadraceError) -> None:
        """A request that was refused because too many run."""
        measure = Measure(self._served.metrics, self._served.clock)
        measure.failed(refusal)
        measure.status = refusal.status
        measure.answered()

    async def _serve(self, msg: Msg, measure: Measure) -> None:
        origin = read_origin(msg)
        if len(msg.data) > (limit := self._served.settings.max_body_bytes):
            raise PayloadTooLarge(f"The body is larger than {limit} bytes.")
        if self._traffic.draining:
            raise Unavailable("The server takes no new requests now.", retry_after=1.0)
        self._traffic.enter()
        try:
            told: dict[str, str] = {}
            caller = await self._accounts.caller(origin.account)
            counted = await self._served.meter.count(caller)
            try:
                begun = await self._chat.begin(parse(msg.data), Asking(caller, told.update, measure, msg.headers.get(HINT)))
                await self._answer(begun, msg.reply, origin, measure, told)
            except Exception as error:
                counted.answered(_refusal(error).status)
                raise
            counted.answered(measure.status)
        finally:
            self._traffic.leave()

    async def _answer(self, begun: Begun, reply: str, origin: Origin, measure: Measure, told: dict[str, str]) -> None:
        cancel = self._subjects.chat_cancel(f"{self._random.getrandbits(128):032x}")
        watch = self._watches[cancel] = self._presence.watch(origin)
        writer = NatsWriter(self._bus, reply, cancel, watch, stream=begun.stream, told=told)
        exchange = begun.exchange(begun.answer.id, self._pace, measure)
        work = asyncio.ensure_future(exchange.work(writer))
        gone = asyncio.ensure_future(watch.gone.wait())
        try:
            timeout = self._served.settings.total_deadline_s + _LATE_S
            await asyncio.wait([work, gone], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the end of this process; what the service layer would say comes after a stream's end
            with suppress(BusError):
                await exchange.fail(writer, EdgeUnavailable("The server is shutting down.", retry_after=1.0))
        finally:
            left = None if work.done() else CLIENT_GONE
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            measure.status = writer.status
            exchange.end(left)
            self._presence.forget(watch)
            del self._watches[cancel]
            with suppress(BusError):
                writer.end()

    def _on_cancel(self, msg: Msg) -> None:
        if (watch := self._watches.get(msg.subject)) is not None:
            watch.gone.set()
            if msg.reply:
                with suppress(BusError):
                    self._bus.publish(msg.reply, b"{}")


def _refusal(error: Exception) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else InternalError("Internal error.")


def chat_service(bus: Bus, subjects: Subjects, chat: NatsChat, most: int, metadata: dict[str, str]) -> Service:
    """As `nats micro ls` shows it: one of the edges gets each request. `most`: requests that run here at once."""
    service = Service(bus, "headrace-chat", "0.1.0", "OpenAI's chat API over NATS", metadata)
    about = {"format": "OpenAI chat completion"}
    service.endpoint("chat", subjects.chat(), chat, queue="edges", metadata=about, most=most, on_full=chat.full)
    return service
