"""One limit a minute, shared by any number of edges: how much of it this edge may still give out.

Edges share a counter for each window. An edge adds to it what it wants; of what it added, the part that lies below the limit is
its own: its *allotment*, spent without asking anybody, void when the window ends. What it did not get, or does not need, it
takes off again. Invariants: what all edges together give out in a window never passes the limit, whatever is lost or comes late;
what stays unspent in other edges' hands is at most two slices each, and what requests gave back less than `KEPT_S` ago. A request
waits for the counter only when the allotment is used up, and then `patience` seconds at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from schemas.errors import BusUnavailable
from services.bus.counters import Count
from services.clock import Clock

SLICES = 32
"""The parts that a limit is taken in, when more than what is needed at once is taken."""
WINDOW_S = 60.0
PATIENCE_S = 0.05
KEPT_S = 1.0
_DOWN_S = 0.25
_SPENT_S = 1.0
"""How long a limit that was used up is believed to be: others may give back."""


class Counter(Protocol):
    """What all edges add to, one number a window."""

    async def __call__(self, window: int, amount: int) -> Count:
        """The window's number with `amount` in it. Raises `BusUnavailable`: it may have been added all the same."""
        ...


class Verdict(Enum):
    GRANTED = auto()
    SPENT = auto()
    """The limit of this window is used up."""
    UNKNOWN = auto()
    """The counter cannot be asked now."""


@dataclass(slots=True)
class _Window:
    number: int
    counted: int = 0
    """By its counter, when it was last asked."""
    held: int = 0
    granted: int = 0
    spent_until: float = 0.0
    """Until then the counter is not asked: nothing was left."""
    era: int = 0
    """Of its counter, as far as what we took has been added to it."""


class Allotment:
    """`limit`: in a window of `window_s` seconds. `kept_s`: how long more than two slices are kept for requests to come."""

    def __init__(self, counter: Counter, clock: Clock, limit: int, window_s: float = WINDOW_S, kept_s: float = KEPT_S) -> None:
        self._counter = counter
        self._clock = clock
        self._window_s = window_s
        self._kept_s = kept_s
        self._slice = max(1, limit // SLICES)
        self._window = _Window(0)
        self._waiting = 0
        """The sum of what requests wait for."""
        self._asking: asyncio.Task[Any] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._down_until = 0.0
        self.limit = limit

    @property
    def held(self) -> int:
        """What this edge can give out without asking. Others may hold more."""
        return self._current().held

    @property
    def remaining(self) -> int:
        """What is left for this edge's callers, as far as it heard: all of a window that it has not asked for yet."""
        window = self._current()
        return window.held + (0 if self.down else max(0, self.limit - window.counted))

    @property
    def down(self) -> bool:
        """Whether the counter could not be asked a moment ago."""
        return self._clock.monotonic() < self._down_until

    def resets_in(self) -> float:
        """Seconds to the end of the window."""
        return self._window_s - self._clock.wall() % self._window_s

    async def take(self, amount: int, patience: float = PATIENCE_S) -> Verdict:
        """`amount` of the limit, all or nothing."""
        deadline = self._clock.monotonic() + patience
        self._waiting += amount
        try:
            while not self._grant(amount):
                window, now = self._current(), self._clock.monotonic()
                if now < window.spent_until or amount > self.limit:
                    self._return_surplus(window, self._waiting - amount)
                    return Verdict.SPENT
                if now >= deadline or self.down:
                    return Verdict.UNKNOWN
                await asyncio.wait({self._ask()}, timeout=deadline - now)
        finally:
            self._waiting -= amount
        return Verdict.GRANTED

    def give_back(self, amount: int, taken_in: int) -> None:
        """Of what was taken in window `taken_in`; it is void when that window is over."""
        window = self._current()
        if window.number == taken_in:
            window.held += amount
            self._watch_surplus()

    @property
    def window(self) -> int:
        return self._current().number

    def took_in(self, window: int) -> bool:
        """Whether part of the window's limit is ours, spent or not."""
        return self._window.number == window and self._window.granted > 0

    async def put_back(self, era: int) -> None:
        """Of a counter that was lost: add again what we took. `era`: of the counters in this window now. A question that is under
        way sees to it by itself."""
        window = self._current()
        if window.granted and window.era != era and self._idle:
            await asyncio.wait({self._begin(self._add(window, 0))})

    def _current(self) -> _Window:
        number = int(self._clock.wall() // self._window_s)
        if number != self._window.number:
            self._window = _Window(number)
        return self._window

    def _grant(self, amount: int) -> bool:
        window = self._current()
        if amount > window.held:
            return False
        window.held -= amount
        if window.held < self._slice and self._clock.monotonic() >= max(window.spent_until, self._down_until):
            self._ask()
        return True

    def _ask(self) -> asyncio.Task[Any]:
        """One question at a time; what others want meanwhile goes with the next one."""
        if self._asking is None or self._asking.done():
            return self._begin(self._take_more())
        return self._asking

    async def _take_more(self) -> None:
        window = self._current()
        if window.held - self._waiting >= self._slice:
            return  # whoever waited for it is gone
        wanted = max(0, self._waiting - window.held) + self._slice
        before = await self._add(window, wanted)
        if before is None:
            return
        granted = min(wanted, max(0, self.limit - before))
        window.granted += granted
        window.held += granted
        if granted < wanted:
            window.spent_until = self._clock.monotonic() + _SPENT_S
            await self._add(window, granted - wanted)
        self._watch_surplus()

    def _watch_surplus(self) -> None:
        """More than two slices are held: if they still are in a while, others may use them."""
        if self._watching is None and self._current().held > 2 * self._slice:
            self._watching = asyncio.get_running_loop().call_later(self._kept_s, self._end_watch)

    def _end_watch(self) -> None:
        self._watching = None
        window = self._current()
        if window.held > 2 * self._slice:
            self._return_surplus(window, self._waiting)
            self._watch_surplus()

    def _return_surplus(self, window: _Window, needed: int) -> None:
        """What is not needed here; not now when something is being asked of the counter. `needed`: others wait for it."""
        surplus = window.held - needed - self._slice
        if surplus > 0 and self._idle:
            window.held -= surplus
            window.granted -= surplus
            self._begin(self._add(window, -surplus))

    @property
    def _idle(self) -> bool:
        """Whether nothing is being asked of the counter."""
        return self._asking is None or self._asking.done()

    def _begin(self, question: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._asking = asyncio.get_running_loop().create_task(question)
        return self._asking

    async def _add(self, window: _Window, amount: int) -> int | None:
        """What was in the counter before, None when it cannot be asked. To one that was lost we add all that we took, and nothing
        is left of it now: others still have to add theirs."""
        ours = window.granted - min(amount, 0)
        try:
            count = await self._counter(window.number, amount)
            before = count.value - amount
            if count.era != window.era or before < ours:
                await self._counter(window.number, ours)
                before = self.limit
        except BusUnavailable:
            self._down_until = self._clock.monotonic() + _DOWN_S
            return None
        window.era, window.counted = count.era, before + amount
        return before
