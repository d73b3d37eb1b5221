"""Whether new work must wait because others come first: jobs of its own or a higher tier that wait, resumes that ask again.

Nothing comes of asking. Must not know admission. Invariant: what waiting cannot help is not told to wait.
"""

from __future__ import annotations

from random import Random

from schemas.job import Job
from schemas.placement import Refused
from services.router.admission import Stays
from services.router.choice import nobody
from services.router.placement import Local, Pair, place
from services.router.placement_request import Request
from services.router.resumes import Resumes
from services.router.view import View
from services.router.waiting import Waiting


class Precedence:
    def __init__(self, view: View, waiting: Waiting, resumes: Resumes, random: Random) -> None:
        self._view = view
        self._waiting = waiting
        self._resumes = resumes
        self._random = random

    def others_first(self, job: Job) -> Stays | Refused | None:
        """What `job`, new work, is told instead of being placed now; None when nobody comes before it."""
        request = Request.of(job)
        if not self.resumes_first(job.model, job.tier, request) and not self._waiting.ahead_of(job.model, job.tier):
            return None
        decision = place(self._view.pools(job.model), request, self._view.now(), self._random)
        return nobody(self._view, job, decision) or Stays("others_wait")

    def resumes_first(self, model: str, tier: str, request: Request) -> bool:
        """Resumed jobs of `tier` or higher ones wait for the workers that could take `request`, and there are no others."""
        pools = self._view.pools(model)
        free = self._resumes.left_for(model, tier, pools)
        return len(free) < len(pools) and not isinstance(place(free, request, self._view.now(), self._random), Pair | Local)
