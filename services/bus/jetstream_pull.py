"""Pulling one message of a JetStream consumer, now or not at all.

A pulled message arrives under its own subject, not under the inbox that asked for it, so answers are told apart by filter.
Invariant: a message that comes when nobody waits for it any more goes back at once; none is held until its ack wait.
"""

from __future__ import annotations

import asyncio

from schemas.errors import BusUnavailable, Disconnected
from services.bus.interface import Msg, Subscription
from services.bus.jetstream import API, JetStream
from services.bus.matching import matches

_NEXT = b'{"batch":1,"no_wait":true}'


class Pulls:
    """One pull at a time over one inbox. A job that arrives after its pull gave up goes back at once."""

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self._inbox = js.bus.new_inbox() + ".pull"
        self._lock = asyncio.Lock()
        self._subscription: Subscription | None = None
        self._number = 0
        self._filter = ""
        self._answer: asyncio.Future[Msg] | None = None

    async def next(self, stream: str, durable: str, subject_filter: str) -> Msg:
        """A job, or the status message that stands for none. Raises `BusUnavailable`."""
        try:
            async with asyncio.timeout(self._js.timeout), self._lock:
                self._number += 1
                self._filter = subject_filter
                self._answer = asyncio.get_running_loop().create_future()
                if self._subscription is None:
                    self._subscription = await self._js.bus.subscribe(f"{self._inbox}.*", self._receive)
                self._js.bus.publish(f"{API}.CONSUMER.MSG.NEXT.{stream}.{durable}", _NEXT, reply=f"{self._inbox}.{self._number}")
                return await self._answer
        except TimeoutError as error:
            raise BusUnavailable("JetStream: no answer to a pull") from error
        except Disconnected as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    def _receive(self, msg: Msg) -> None:
        waiting = self._answer is not None and not self._answer.done()
        if msg.subject.startswith(self._inbox):
            wanted = msg.subject == f"{self._inbox}.{self._number}"
        else:
            wanted = matches(self._filter, msg.subject)
        if waiting and wanted and self._answer is not None:
            self._answer.set_result(msg)
        elif msg.reply:
            self._js.bus.publish(msg.reply, b"-NAK")
