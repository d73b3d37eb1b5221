"""Hears what crosses the bus, as the operator may, so that a fault can meet a certain moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from schemas.codec import decode
from schemas.handoff import Handoff
from schemas.identity import process_name
from schemas.lifecycle import State
from schemas.reply import Digest, Frames, Reply
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up

WITHIN_S = 60.0
Finds = Callable[[Msg], str]
"""The process a message is about, when it is the moment that is waited for; else ""."""


class Tap:
    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    async def first(self, subject: str, find: Finds, then: Callable[[str], object]) -> str:
        """Call `then` with the name of the process that `find` found, at once; the name. Raises TimeoutError."""
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def heard(msg: Msg) -> None:
            process = find(msg)
            if process and not found.done():
                name = process_name(process)
                then(name)
                found.set_result(name)

        subscription = await self.operator.client.subscribe(subject, cb=heard)
        try:
            async with asyncio.timeout(WITHIN_S):
                return await found
        finally:
            await subscription.unsubscribe()

    async def all_of(self, subject: str) -> list[Msg]:
        """A list to which every message on `subject` from now on is added."""
        messages: list[Msg] = []

        async def heard(msg: Msg) -> None:
            messages.append(msg)

        await self.operator.client.subscribe(subject, cb=heard)
        await self.operator.client.flush()
        return messages


@asynccontextmanager
async def tap(up: Up) -> AsyncIterator[Tap]:
    async with operator(up) as op:
        yield Tap(op)


def addressee(msg: Msg) -> str:
    """`hr.prefill.*.submit`, `hr.decode.*.handoff`, `hr.decode.*.offer`: who is asked."""
    return str(msg.subject.split(".")[2])


def handing_off(msg: Msg) -> str:
    """`hr.decode.*.handoff`: whose blocks are offered."""
    return decode(msg.data, Handoff).prefill


def handed_over(msg: Msg) -> str:
    """`hr.reply.*`: who was told by decode, with DECODING, that its blocks were taken. Not in the message, so any will do."""
    said: Frames | Digest = decode(msg.data, Reply)  # type: ignore[arg-type]
    return said.process if isinstance(said, Frames) and any(event.state is State.DECODING for event in said.events) else ""
