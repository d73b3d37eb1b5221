"""What the routers say on `hr.queue`: which models can be served, who waits, how fast the queue drains, which routers live.

Owns the last report of each router. Must not know jobs. Invariants: nothing older than its lifetime is believed; of what can be
served nothing is forgotten because our own connection was down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schemas.state import ModelCard, QueueReport
from services.bus.silence import Line
from services.clock import Clock
from services.edge.jobs.timing import Timing

LONGEST_RETRY_S = 120.0
"""Clients do not retry at all when told to wait longer."""


@dataclass(slots=True)
class _Heard:
    at: float
    report: QueueReport


class ModelBoard:
    def __init__(self, clock: Clock, line: Line, timing: Timing) -> None:
        self._clock = clock
        self._line = line
        self._timing = timing
        self._reports: dict[tuple[str, str], _Heard] = {}
        self._cards: dict[str, tuple[float, ModelCard]] = {}

    def hear(self, report: QueueReport) -> None:
        now = self._clock.monotonic()
        self._reports[report.router, report.model] = _Heard(now, report)
        if report.card is not None:
            self._cards[report.model] = (now, report.card)
        if len(self._reports) > 1:
            self._reports = {key: heard for key, heard in self._reports.items() if now - heard.at < self._timing.card_alive_s}

    def card(self, model: str) -> ModelCard | None:
        """None when no router has named a live worker of `model` lately, although we could have heard it."""
        at, card = self._cards.get(model, (-math.inf, None))
        silent_for = min(self._clock.monotonic() - at, self._line.steady_for())
        return card if silent_for < self._timing.card_alive_s else None

    def models(self) -> list[str]:
        return sorted(model for model in self._cards if self.card(model) is not None)

    def routers(self, model: str | None = None) -> list[str]:
        """Routers heard within the last second, in order of their ids."""
        return sorted({h.report.router for h in self._alive() if model in (None, h.report.model)})

    def waiting(self, model: str) -> int:
        """Jobs in the queue of `model`; each router counts all of them."""
        return max((sum(h.report.waiting.values()) for h in self._alive() if h.report.model == model), default=0)

    def retry_after(self, model: str) -> float:
        """Whole seconds until the queue of `model` has drained at its present rate, 1..120."""
        rate = sum(h.report.drain_rate for h in self._alive() if h.report.model == model)
        waiting = self.waiting(model)
        if not waiting:
            return 1.0
        return max(1.0, float(math.ceil(min(waiting / rate, LONGEST_RETRY_S)))) if rate > 0 else LONGEST_RETRY_S

    def _alive(self) -> list[_Heard]:
        now = self._clock.monotonic()
        return [heard for heard in self._reports.values() if now - heard.at < self._timing.router_alive_s]
