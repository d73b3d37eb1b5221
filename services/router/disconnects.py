"""Workers whose connection the server saw end and that do not come back: a hint, ahead of the silence that would tell it later.

Owns who is away, and since when. Must not know what anybody does about it. Invariants: who connects again or is heard within
500 ms was never away; when several go together it is the bus, and nothing is said of anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.bus.silence import SILENT_S, TOGETHER_S, Line
from services.clock import Clock

BACK_S = 0.5
"""How long a process may take to connect again; clients try every 100 ms."""


class Disconnects:
    """`gone` is called with a process that did not come back."""

    def __init__(self, line: Line, clock: Clock, gone: Callable[[str], None]) -> None:
        self._line = line
        self._clock = clock
        self._gone = gone
        self._heard: dict[str, float] = {}
        self._away: dict[str, float] = {}

    def heard(self, process: str) -> None:
        """A sign of life: a beat, a report, a new connection."""
        self._heard[process] = self._clock.monotonic()
        self._away.pop(process, None)

    def ended(self, process: str) -> None:
        """Its connection ended."""
        if process in self._heard:
            since = self._away[process] = self._clock.monotonic()
            asyncio.get_running_loop().call_later(BACK_S, self._judge, process, since)

    def died(self, process: str) -> None:
        """Proven, or it left: no more than a hint is needed."""
        self._heard.pop(process, None)
        self._away.pop(process, None)

    def away(self, process: str) -> bool:
        return process in self._away

    def forget_old(self) -> None:
        """Who was silent for long is no peer any more. Bounds memory; call it now and then."""
        oldest = self._clock.monotonic() - SILENT_S
        self._heard = {process: at for process, at in self._heard.items() if at > oldest or process in self._away}
        self._away = {process: at for process, at in self._away.items() if at > oldest}

    def _judge(self, process: str, since: float) -> None:
        if self._away.get(process) != since or self._line.steady_for() < SILENT_S:
            return
        together = sum(abs(at - since) <= TOGETHER_S for at in self._away.values())
        if together < 2 or 3 * together < len(self._heard):
            self._gone(process)
