"""Messages instead of bytes: send, ask, answer, listen. Knows the codec; must not know what a message is for.

Invariant: an unreadable message is refused whole, counted, and logged at most once a second; one that somebody waits for
is refused to their face (an empty answer with header `Headrace-Error`), so that nobody waits for a time-out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, overload

from schemas.codec import Message, version_of
from schemas.errors import Disconnected, UnreadableMessage, from_code
from services.bus.interface import Bus, Msg, Subscription
from services.clock import Clock, SystemClock
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

ERROR_HEADER = "Headrace-Error"
_FAMILIES = frozenset(
    {"submit", "router", "jobs", "queue", "cancel", "prefill", "decode", "reply", "ctl", "state", "dead"}
    | {"kvevents", "job", "admin", "v1", "_INBOX"}
)

M = TypeVar("M")
_log = logging.getLogger("headrace.bus")


class Refusals:
    """Counts what was refused and what nobody listened to, by subject family and reason: both bounded."""

    def __init__(self, metrics: Metrics | None = None, clock: Clock | None = None) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self.unheard: Counter[str] = Counter()
        self._metrics = metrics or Metrics.null()
        self._may_log = AtMost((clock or SystemClock()).monotonic)

    def refuse(self, subject: str, error: UnreadableMessage) -> None:
        """One message on `subject` was unreadable."""
        kind, reason = family(subject), error.code or "unreadable_message"
        self.refused[kind, reason] += 1
        self._metrics.bus_refused.add(1, {"family": kind, "reason": reason})
        held_back = self._may_log()
        if held_back is not None:
            _log.warning("refused an unreadable message", extra=fields(subject=subject, error=error, held_back=held_back))

    def nobody_listened(self, subject: str) -> None:
        """The server said that nobody heard a message whose reply subject was `subject`."""
        kind = family(subject)
        self.unheard[kind] += 1
        self._metrics.bus_unheard.add(1, {"family": kind})


def family(subject: str) -> str:
    """The part of a subject that tells what it is for, one of a fixed set; `other` for what is not in the table."""
    return next((token for token in subject.split(".")[:3] if token in _FAMILIES), "other")


def send(bus: Bus, subject: str, message: Message, *, reply: str = "") -> None:
    """Publish `message`. Raises `Disconnected`, `MessageTooLarge`."""
    bus.publish(subject, bus.dialect.encode(message), reply=reply)


def answer(bus: Bus, request: Msg, message: Message) -> bool:
    """Answer `request`, in its own schema version. False when nobody waits or our connection is down: a time-out covers both."""
    if not request.reply:
        return False
    try:
        bus.publish(request.reply, bus.dialect.encode(message, version_of(request.data)))
    except Disconnected:
        return False
    return True


@overload
async def ask(bus: Bus, subject: str, message: Message, kind: type[M], *, timeout: float) -> M: ...
@overload
async def ask(bus: Bus, subject: str, message: Message, kind: UnionType, *, timeout: float) -> Any: ...
async def ask(bus: Bus, subject: str, message: Message, kind: Any, *, timeout: float) -> Any:
    """The answer to `message`, a `kind`.

    Raises `NoResponders`, `RequestTimeout`, `Disconnected`, `MessageTooLarge`; `UnreadableMessage` when the peer could
    not read us or we cannot read it.
    """
    reply = await bus.request(subject, bus.dialect.encode(message), timeout=timeout)
    code = reply.headers.get(ERROR_HEADER)
    if code is not None:
        error = from_code(code, f"{subject} refused our message: {code}")
        raise error if isinstance(error, UnreadableMessage) else UnreadableMessage(error.message)
    return bus.dialect.decode(reply.data, kind)


@overload
async def listen(
    bus: Bus,
    subject: str,
    kind: type[M],
    handler: Callable[[M, Msg], None],
    *,
    refusals: Refusals,
    queue: str = "",
    on_unheard: Callable[[], None] | None = None,
) -> Subscription: ...
@overload
async def listen(
    bus: Bus,
    subject: str,
    kind: UnionType,
    handler: Callable[[Any, Msg], None],
    *,
    refusals: Refusals,
    queue: str = "",
    on_unheard: Callable[[], None] | None = None,
) -> Subscription: ...
async def listen(
    bus: Bus,
    subject: str,
    kind: Any,
    handler: Callable[[Any, Msg], None],
    *,
    refusals: Refusals,
    queue: str = "",
    on_unheard: Callable[[], None] | None = None,
) -> Subscription:
    """Call `handler(message, msg)` for each readable message on `subject`. Raises `Disconnected`.

    `on_unheard` runs when the server says that nobody listened to something we sent with this subject as its reply.
    """

    def receive(msg: Msg) -> None:
        if msg.no_responders:
            refusals.nobody_listened(msg.subject)
            if on_unheard is not None:
                on_unheard()
            return
        try:
            message = bus.dialect.decode(msg.data, kind)
        except UnreadableMessage as error:
            refusals.refuse(msg.subject, error)
            _refuse_to_their_face(bus, msg, error)
            return
        handler(message, msg)

    return await bus.subscribe(subject, receive, queue=queue)


def _refuse_to_their_face(bus: Bus, msg: Msg, error: UnreadableMessage) -> None:
    # A reply subject that is no inbox is a control subject: whoever listens there asked nothing.
    if msg.reply.startswith("_INBOX.") and bus.connected:
        bus.publish(msg.reply, b"", headers={ERROR_HEADER: error.code or "unreadable_message"})
