"""From one attempt to the next, until a job is complete or nothing helps any more.

Owns the decision whether there is a next attempt, and when. A job that was once owned is resumed for as long as its total
deadline allows; work that nobody has owned yet is tried a few times only, besides the time that a queue or a connection
which is away is given. Must not know messages.
"""

from __future__ import annotations

import asyncio
from random import Random

from schemas.errors import BusUnavailable, OwnersDied, Unavailable
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.submission import NO_BUS, QUEUE_UNREACHABLE, Submission
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire
from services.telemetry.metrics import Metrics

_RETRY_S = 1.0


class JobLife:
    def __init__(
        self, wire: Wire, submission: Submission, board: ModelBoard, timing: Timing, random: Random, metrics: Metrics
    ) -> None:
        self._wire = wire
        self._submission = submission
        self._board = board
        self._timing = timing
        self._random = random
        self._metrics = metrics

    async def run(self, job: ActiveJob, *, begun: bool = False) -> None:
        """Returns when every choice has finished. Raises the `HeadraceError` that ends the job.

        `begun`: somebody has the current attempt already. Bounded by the job's total deadline, which its supervisor enforces.
        """
        router, failures = "", 0
        while True:
            received = job.tokens.progress
            end = await (self._see_through(job) if begun else self._attempt(job, router))
            begun = False
            if end is None or job.tokens.complete:  # what was still on its way may have completed it
                return
            while not job.held():  # noqa: ASYNC110 - let go in a moment, or ours again
                await asyncio.sleep(self._timing.repeat_s)
            if end.alive and job.run:
                self._wire.cancel_owners(job)
            failures += end.kind not in (QUEUE_UNREACHABLE, NO_BUS)
            self._check(job, end, failures)
            self._metrics.retries.add(1, {"reason": end.kind})
            router = self._another_router(job) if end.kind == "router_silent" else ""
            if end.kind not in ("death", "router_silent") and job.tokens.progress == received:
                pace_s = self._timing.queue_pace_s if end.kind == QUEUE_UNREACHABLE else self._timing.pace_s
                await asyncio.sleep(self._random.uniform(*pace_s))
                if job.tokens.complete:
                    return
            job.next_attempt()

    async def _attempt(self, job: ActiveJob, router: str) -> AttemptEnd | None:
        unplaced = await self._submission.place(job, router)
        if unplaced is not None:
            job.end_attempt(unplaced)
            return unplaced
        job.admitted = job.answered = True
        job.mailbox.wake()
        return await self._see_through(job)

    async def _see_through(self, job: ActiveJob) -> AttemptEnd | None:
        while not await self._ended(job, self._timing.owned_s):
            if job.run and not job.hop and self._wire.bus.steady_for() >= self._timing.settle_s:
                # A worker that accepted says *owned* at once; one that never does is not waited for until the deadline.
                job.end_attempt(AttemptEnd("silent", Unavailable("No worker answered.", retry_after=1.0), alive=True))
            elif job.hop:
                await self._ended(job, None)
        return job.over.result()

    @staticmethod
    async def _ended(job: ActiveJob, timeout: float | None) -> bool:
        """Whether the attempt is over by then. The future is not awaited itself: our cancellation would cancel it."""
        await asyncio.wait({job.over}, timeout=timeout)
        return job.over.done()

    def _check(self, job: ActiveJob, end: AttemptEnd, failures: int) -> None:
        if job.deaths >= self._timing.deaths:
            raise OwnersDied("The servers that worked on this request failed.")
        if job.detached and job.admitted and end.error.retryable:
            return  # nobody waits in front of it, and it was promised
        if self._wire.bus.down_for() > self._timing.cut_off_s:
            raise BusUnavailable("The service lost its connection.", retry_after=_RETRY_S)
        if end.final or (not job.owned and failures >= self._timing.fresh_attempts):
            raise end.error

    def _another_router(self, job: ActiveJob) -> str:
        """Which one was silent is not known: a queue group chose it."""
        routers = self._board.routers(job.draft.model)
        return self._random.choice(routers) if routers else ""
