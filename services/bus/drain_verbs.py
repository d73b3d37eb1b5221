"""`drain` and `undrain` of one service process, as an operator asks for them. Must not know what is drained.

Draining is no end: the process takes no new work, what it has goes on, and `undrain` takes it back. Invariant: a process that was
told to end never takes work again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from schemas.errors import Unavailable
from services.bus.interface import Msg
from services.bus.micro_endpoint import Answer, ServiceHandler
from services.bus.questions import asks_nothing


def drain_verbs(set_draining: Callable[[bool], Awaitable[Answer]], stop: asyncio.Event) -> dict[str, ServiceHandler]:
    """Handlers by verb. `set_draining` answers with the status that then holds; `stop` is set once the process shall end."""

    async def drain(_: Msg) -> Answer:
        return await set_draining(True)

    async def undrain(_: Msg) -> Answer:
        if stop.is_set():
            raise Unavailable("the process is ending")
        return await set_draining(False)

    return {"drain": asks_nothing(drain), "undrain": asks_nothing(undrain)}
