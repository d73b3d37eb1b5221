"""Jobs that wait in a queue which may have lost them: each is put there again.

The queue lies in the memory of the NATS server, so a restart empties it. Owns one look each 250 ms at the jobs that wait.
Invariant: a job is put again as the same attempt under the same id, so a queue that has not lost it takes no second one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from services.bus.interface import Bus
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.submission import Submission

EVERY_S = 0.25
LOST_S = 2.0
"""How long a job may wait in a queue of which every router says that it is empty."""


class Requeue:
    def __init__(self, jobs: Mapping[str, ActiveJob], submission: Submission, board: ModelBoard, bus: Bus) -> None:
        self._jobs = jobs
        self._submission = submission
        self._board = board
        self._bus = bus

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Put the jobs again that may be lost, one after another, as long as the queue takes them."""
        for job in list(self._jobs.values()):
            if job.waits and self._may_be_lost(job) and not await self._submission.put_again(job):
                return

    def _may_be_lost(self, job: ActiveJob) -> bool:
        waited = asyncio.get_running_loop().time() - job.queued_at
        if waited > self._bus.steady_for():
            return True  # our connection was lost meanwhile; what else was, is not known
        model = job.draft.model
        return LOST_S < waited < math.inf and bool(self._board.routers(model)) and not self._board.waiting(model)
