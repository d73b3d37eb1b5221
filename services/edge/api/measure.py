"""What is recorded of one request: that it was answered, and how; time to first token, per token and to its end; tokens.

A failure after the first byte counts as the failure it is. Labels are bounded, whatever callers send: a model that is served, a
fixed set of outcomes, a status.
"""

from __future__ import annotations

from schemas.errors import HeadraceError
from services.clock import Clock
from services.telemetry.metrics import Metrics

CLIENT_GONE, CLIENT_STALLED = "client_gone", "client_stalled"
QUEUED = "queued"
"""What comes of a request in the background is another story: it was answered."""
_DONE = "done"
_UNKNOWN = "unknown"
_NO_ANSWER = 499


class Measure:
    """Begins when the request arrives. `model`: who answers it, as far as is known; "" = nobody who is served was asked for.
    `status`: of the answer, 0 as long as there is none."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self.model = ""
        self.status = 0
        self._started = clock.monotonic()
        self._outcome = ""
        self._first: float | None = None
        self._last = 0.0

    def text(self) -> None:
        """The client gets text; the first time is what it waited for."""
        self._last = self._clock.monotonic()
        if self._first is None:
            self._first = self._last
            self._metrics.time_to_first_token.record(self._first - self._started, self._model)

    def finished(self, outcome: str) -> None:
        self._outcome = outcome

    def failed(self, error: HeadraceError) -> None:
        self._outcome = error.code or "error"

    def left(self, outcome: str) -> None:
        """Nobody reads on. Counts when nothing else was reported before."""
        self._outcome = self._outcome or outcome

    def computed(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Of a request that became a job, at the job's end: what was computed."""
        self._metrics.e2e_request_latency.record(self._clock.monotonic() - self._started, self._model)
        if self._first is not None and completion_tokens > 1:
            self._metrics.time_per_output_token.record((self._last - self._first) / (completion_tokens - 1), self._model)
        self._metrics.prompt_tokens.add(prompt_tokens, self._model)
        self._metrics.generation_tokens.add(completion_tokens, self._model)

    def answered(self) -> None:
        """Nothing more is sent, whatever became of it: the request counts. To be called once."""
        outcome = self._outcome or (_DONE if self.status else CLIENT_GONE)
        if outcome in (CLIENT_GONE, CLIENT_STALLED):
            self._metrics.requests_cancelled.add(1, self._model)
        self._metrics.requests.add(1, {**self._model, "outcome": outcome, "status": str(self.status or _NO_ANSWER)})

    @property
    def _model(self) -> dict[str, str]:
        return {"model": self.model or _UNKNOWN}
