"""Where a job's consumer waits: woken once however much came, so a slow client reads many tokens at a time.

Owns one waiter and one timer. Invariant: a wake-up before the wait is not lost. The timer is not called off when a wait ends, but
looks when it rings whether a wait is over: a stream waits for every token, and a timer each would cost more than the waiting.
"""

from __future__ import annotations

import asyncio


class Mailbox:
    __slots__ = ("_flag", "_over", "_rings", "_timer", "_waiter")

    def __init__(self) -> None:
        self._flag = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = self._rings = 0.0
        """When the last wait is over, and when the timer rings (the event loop's time)."""

    def wake(self) -> None:
        """Called for every message of a job: it must stay cheap."""
        self._flag = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float) -> bool:
        """True when woken since the last wait, False after `timeout` seconds. One waiter at a time."""
        if not self._flag:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._over = loop.time() + timeout
            if self._timer is None or self._over < self._rings:
                self._set(loop)
            try:
                await self._waiter
            finally:
                self._waiter = None
        woken, self._flag = self._flag, False
        return woken

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings = self._over
        self._timer = loop.call_at(self._rings, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets the timer
        loop = asyncio.get_running_loop()
        if loop.time() < self._over:
            self._set(loop)
        else:
            self._waiter.set_result(None)


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
