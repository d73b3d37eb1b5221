"""Where new work asks to come in: what admission must see of one job and its model, put together.

Owns one gate a model. Must not know workers, nor how a job is placed. Invariant: a resume is not new work, and never asks here.
"""

from __future__ import annotations

from schemas.job import Job
from services.clock import Clock
from services.router.admission import Left, TurnedAway
from services.router.gate import Gate
from services.router.waiting import Waiting
from services.worker.edges import EdgeWatch


class Entry:
    def __init__(self, waiting: Waiting, edges: EdgeWatch, clock: Clock) -> None:
        self._waiting = waiting
        self._edges = edges
        self._clock = clock
        self._gates: dict[str, Gate] = {}

    def enter(self, job: Job) -> TurnedAway | None:
        """One submit of new work. None: it may be placed, or wait."""
        gate, lanes = self._seen(job.model)
        others = self._waiting.routers(job.model)
        return gate.enter(job.tier, job.lane, lanes, self.left(job), self._clock.monotonic(), others)

    def ask(self, job: Job) -> TurnedAway | None:
        """What `enter` would say, and nothing comes of it: a model that nobody has submitted to gets no gate."""
        gate, lanes = self._gates.get(job.model) or Gate(), self._waiting.ahead(job.model)
        gate.sees(lanes, self._clock.monotonic())
        others = self._waiting.routers(job.model)
        return gate.ask(job.tier, job.lane, lanes, self.left(job), self._clock.monotonic(), others)

    def counted(self) -> None:
        """The queue was counted anew."""
        for model in self._gates:
            self._seen(model)

    def placed(self, job: Job) -> None:
        """A job that waited has a worker. Call it while it still counts as waiting."""
        gate, _ = self._seen(job.model)
        gate.placed(job.tier, self._clock.monotonic())

    def left(self, job: Job) -> Left:
        """By this router's clock. A resume has no first-token deadline, and never waits in the queue."""
        if job.resume:
            return Left()
        queue, first = job.deadlines.queue, job.deadlines.first_token
        return Left(
            queue_s=float("inf") if queue is None else self._edges.remaining(job.edge, job.deadlines, queue),
            first_token_s=float("inf") if first is None else self._edges.remaining(job.edge, job.deadlines, first),
            anew_s=first or 0.0,
        )

    def _seen(self, model: str) -> tuple[Gate, dict[str, dict[int, int]]]:
        gate, lanes = self._gates.setdefault(model, Gate()), self._waiting.ahead(model)
        gate.sees(lanes, self._clock.monotonic())
        return gate, lanes
