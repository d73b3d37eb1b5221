"""What is recorded of one request: time to first token, per token and to its end, tokens, how it ended.

A failure after the first byte counts as the failure it is. Labels are the model and a fixed set of outcomes.
"""

from __future__ import annotations

from schemas.errors import HeadraceError
from services.clock import Clock
from services.telemetry.metrics import Metrics


class Measure:
    """Begins when the request arrived (`started`, monotonic seconds)."""

    def __init__(self, metrics: Metrics, clock: Clock, model: str, started: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self.model = model
        self._model = {"model": model}
        self._started = started
        self._outcome = ""
        self._first: float | None = None
        self._last = 0.0

    def text(self) -> None:
        """The client gets text; the first time is what it waited for."""
        self._last = self._clock.monotonic()
        if self._first is None:
            self._first = self._last
            self._metrics.time_to_first_token.record(self._first - self._started, self._model)

    def finished(self, reason: str) -> None:
        self._outcome = reason

    def failed(self, error: HeadraceError) -> None:
        self._outcome = error.code or "error"

    def end(self, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        """`outcome` counts when nothing else was reported: a client that left early."""
        if not self._outcome and outcome != "done":
            self._metrics.requests_cancelled.add(1, self._model)
        self._metrics.requests.add(1, {**self._model, "outcome": self._outcome or outcome})
        self._metrics.e2e_request_latency.record(self._clock.monotonic() - self._started, self._model)
        if self._first is not None and completion_tokens > 1:
            self._metrics.time_per_output_token.record((self._last - self._first) / (completion_tokens - 1), self._model)
        self._metrics.prompt_tokens.add(prompt_tokens, self._model)
        self._metrics.generation_tokens.add(completion_tokens, self._model)
