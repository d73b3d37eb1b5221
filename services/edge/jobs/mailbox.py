"""Where a job's consumer waits: woken once however much came, so a slow client reads many tokens at a time.

Owns one waiter. Invariant: a wake-up before the wait is not lost.
"""

from __future__ import annotations

import asyncio


class Mailbox:
    __slots__ = ("_flag", "_waiter")

    def __init__(self) -> None:
        self._flag = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Called for every message of a job: it must stay cheap."""
        self._flag = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float) -> bool:
        """True when woken since the last wait, False after `timeout` seconds. One waiter at a time."""
        if not self._flag:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(timeout, _resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        woken, self._flag = self._flag, False
        return woken


class Fanout(Mailbox):
    """A mailbox that wakes those of any number of readers too."""

    __slots__ = ("readers",)

    def __init__(self, readers: set[Mailbox]) -> None:
        super().__init__()
        self.readers = readers

    def wake(self) -> None:
        super().wake()
        for reader in self.readers:
            reader.wake()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
