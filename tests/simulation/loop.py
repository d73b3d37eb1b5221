"""An event loop whose time is a number: it jumps to the next timer when nothing is ready, and sleeps never.

Owns the order of everything: no threads, no sockets, no wall clock. Invariant: a callback belongs to the process in whose context
it was scheduled, and runs only while that process does; what a paused one misses waits for it, in order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any

_LIVELOCK = 200_000
_owner: ContextVar[Process | None] = ContextVar("process", default=None)


class Life(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """One simulated process: what runs in its context stops when it is paused or killed. `id` is its process id."""

    def __init__(self, loop: VirtualLoop, name: str, id: str) -> None:
        self.name = name
        self.id = id
        self.life = Life.RUNNING
        self.since = loop.time()
        """When `life` changed last."""
        self.context: Context = copy_context()
        self.context.run(_owner.set, self)
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def running(self) -> bool:
        return self.life is Life.RUNNING

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._loop.create_task(work, name=name, context=self.context.copy())

    def pause(self) -> None:
        self._become(Life.PAUSED)

    def resume(self) -> None:
        if self.life is Life.PAUSED:
            self._become(Life.RUNNING)
            self._loop.again(self._held)
            self._held = []

    def kill(self) -> None:
        """kill -9: not one more of its callbacks runs."""
        self._become(Life.DEAD)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its unfinished tasks, oldest first."""
        self._tasks = {task: None for task in self._tasks if not task.done()}
        return list(self._tasks)

    async def reap(self) -> None:
        """Take the remains of a dead process apart, so that no coroutine is left; nothing of it reaches anybody."""
        self.life = Life.RUNNING
        self._loop.again(self._held)
        self._held = []
        while remains := self.tasks():  # a task that ends may begin another
            for task in remains:
                task.cancel()
            await asyncio.gather(*remains, return_exceptions=True)

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        if len(self._tasks) % 256 == 0:
            self.tasks()

    def hold(self, handle: asyncio.Handle) -> None:
        self._held.append(handle)

    def _become(self, life: Life) -> None:
        if not self.dead:
            self.life = life
            self.since = self._loop.time()


class Stuck(AssertionError):
    """Nothing will ever happen again, or time does not move any more."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0.0."""

    # Of BaseEventLoop only `_run_once` is replaced: it is the one place where an event loop waits.
    _ready: Any
    _scheduled: Any

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def again(self, handles: list[asyncio.Handle]) -> None:
        """Run what was held back, next."""
        self._ready.extend(handles)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, context=context)
        owner = _owner.get() if context is None else context.get(_owner)
        if owner is not None:
            owner.own(task)
        return task

    def _run_once(self) -> None:
        self._move_time()
        while self._scheduled and self._scheduled[0].when() <= self._now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle.cancelled():
                continue
            owner = handle._context.get(_owner)
            if owner is None or owner.life is Life.RUNNING:
                handle._run()
            else:
                owner.hold(handle)

    def _move_time(self) -> None:
        if self._ready:
            self._turns += 1
            if self._turns > _LIVELOCK:
                raise Stuck(f"time stands still at {self._now}")
            return
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._scheduled:
            raise Stuck("nothing is left to happen")
        self._turns = 0
        self._now = max(self._now, self._scheduled[0].when())

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave the heap when their time comes."""

    def _write_to_self(self) -> None:
        """No other thread wakes this loop."""
