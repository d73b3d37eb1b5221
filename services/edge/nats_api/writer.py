"""An answer over NATS: each event is one message to the caller, an empty one ends a stream.

Invariants: nothing is sent after the end; what is no stream is one message, and where that would be too large, one refusal. A
connection that is down loses what is sent, and with it the caller: then the answer is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from services.bus.interface import Bus
from services.edge.api.form import DONE
from services.edge.api.watch import Header
from services.edge.nats_api.presence import Watch

CANCEL = "Headrace-Cancel"
STATUS = "Nats-Service-Error-Code"
_DATA = b"data: "


class NatsWriter:
    """`cancel`: the subject on which the caller may give up; `told`: headers of HTTP. Both come with the first message."""

    def __init__(
        self, bus: Bus, reply: str, cancel: str, watch: Watch, *, stream: bool, told: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._bus = bus
        self._reply = reply
        self._watch = watch
        self._stream = stream
        self._headers: dict[str, str] = {CANCEL: cancel, **{_as_nats(name): value for name, value in told.items()}}
        self._ended = False
        self.started = False
        self.status = 0
        """As HTTP's; 0 as long as there is no answer."""

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """`headers` are HTTP's. A refusal is one message, with its status as NATS services tell it.

        Nothing is sent yet: what is to be one message may still become a refusal.
        """
        self.started, self.status = self._stream, status
        if status >= 400:
            self._stream = False
            self._headers[STATUS] = str(status)
            if retry := dict(headers).get(b"retry-after"):
                self._headers["Retry-After"] = retry.decode()

    async def body(self, data: bytes, *, more: bool = True) -> None:
        """Raises `Disconnected`, `MessageTooLarge`."""
        if STATUS in self._headers:
            self._headers["Nats-Service-Error"] = " ".join(msgspec.json.decode(data)["error"]["message"].split())
        for event in data.split(b"\n\n") if self._stream else [data]:
            if event and not event.startswith(b":") and event + b"\n\n" != DONE:
                self._publish(event.removeprefix(_DATA))
        if not more:
            self.end()

    def end(self) -> None:
        """A stream's last message. Safe to call twice."""
        if self._stream and not self._ended:
            self._publish(b"")
        self._ended = True

    def _publish(self, data: bytes) -> None:
        if not self._ended:
            headers, self._headers = self._headers | self._watch.headers(), {}
            self._bus.publish(self._reply, data, headers=headers or None)


def _as_nats(header: str) -> str:
    """`x-headrace-model` → `Headrace-Model`."""
    return header.removeprefix("x-").title()
