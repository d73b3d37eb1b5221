"""What an engine measured of its own steps: counts, the p99 of recent steps, prefill and decode rates."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from schemas.state import Rates
from services.engine.measured import WINDOW, average, p99
from services.engine.protocol import EngineStats
from services.engine.scheduler import Step


class StepStatistics:
    """p99 is over the last 512 steps, in seconds; rates are exponential averages."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque()
        self._ordered: list[float] = []
        """The same: whoever asks for credits waits for no sort."""
        self._steps = 0
        self._prefill_tokens_s = 0.0
        self._decode_step_s = 0.0

    def observe(self, step: Step, seconds: float) -> None:
        self._steps += 1
        self._seconds.append(seconds)
        insort(self._ordered, seconds)
        if len(self._seconds) > WINDOW:
            del self._ordered[bisect_left(self._ordered, self._seconds.popleft())]
        prompt = step.prompt_tokens
        if prompt == 0:
            self._decode_step_s = average(self._decode_step_s, seconds)
        elif seconds > 0:
            self._prefill_tokens_s = average(self._prefill_tokens_s, prompt / seconds)

    def snapshot(
        self,
        *,
        queued: int,
        queued_tokens: int,
        running: int,
        swapped: int,
        backlog: int,
        yielding: int,
        yielding_queued: int,
        step_tokens: int,
        in_step_s: float,
    ) -> EngineStats:
        return EngineStats(
            queued=queued,
            queued_tokens=queued_tokens,
            step_tokens=step_tokens,
            running=running,
            backlog=backlog,
            yielding=yielding,
            yielding_queued=yielding_queued,
            swapped=swapped,
            steps=self._steps,
            step_p99_s=p99(self._ordered),
            in_step_s=in_step_s,
            rates=Rates(prefill_tokens_s=self._prefill_tokens_s, decode_step_s=self._decode_step_s),
        )
