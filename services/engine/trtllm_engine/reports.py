"""What the legs of one turn of the loop did, told to the worker as one step: the records of one step travel in one message.

Invariant: a run's tokens are told before its end. While paused nothing is told but the ends of runs that were dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.engine.protocol import OnStep, RunEnd, RunTotals, StepReport, TokenOutput


class Reports:
    """`on_fault`: called with what `on_step` raised."""

    def __init__(self, on_step: OnStep, on_fault: Callable[[Exception], None]) -> None:
        self._on_step = on_step
        self._on_fault = on_fault
        self._tokens: list[TokenOutput] = []
        self._prefilled: dict[int, RunTotals] = {}
        self._ended: list[RunEnd] = []
        self._seconds = 0.0
        self._unfetched = 0
        self._due = False
        self._paused = False

    def tokens(self, outputs: Sequence[TokenOutput]) -> None:
        self._tokens += outputs
        self._tell_soon()

    def prefilled(self, run: int, totals: RunTotals) -> None:
        self._prefilled[run] = totals
        self._tell_soon()

    def end(self, end: RunEnd, *, dropped: bool = False) -> None:
        """`dropped`: nobody waits for its tokens."""
        if dropped:
            self._tokens = [output for output in self._tokens if output.run != end.run]
        if dropped and self._paused:
            self._tell(StepReport(ended=(end,)))
            return
        self._ended.append(end)
        self._tell_soon()

    def step(self, seconds: float) -> None:
        """An iteration of the engine took so long."""
        self._seconds = max(self._seconds, seconds)
        self._tell_soon()

    def unfetched(self, count: int) -> None:
        """So many handoffs became overdue."""
        self._unfetched += count
        self._tell_soon()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._due and not self._paused:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._due = False
        if self._paused:
            return
        tokens = tuple(sorted(self._tokens, key=lambda output: output.run))  # stable: a run's tokens stay in order
        report = StepReport(tokens, self._prefilled, tuple(self._ended), self._seconds, unfetched=self._unfetched)
        self._tokens, self._prefilled, self._ended, self._seconds, self._unfetched = [], {}, [], 0.0, 0
        self._tell(report)

    def _tell(self, report: StepReport) -> None:
        try:
            self._on_step(report)
        except Exception as error:
            self._on_fault(error)
