"""Resumed jobs that found no credit at this router: they come again within 200 ms, and new work does not take what they wait for.

Owns who asked lately. Must not know where they could run beyond their weights. Invariant: what has not been asked for within
`FRESH_S` holds nobody back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from schemas.job import Job
from services.clock import Clock
from services.router.lanes import rank
from services.router.placement_workers import Pool

FRESH_S = 0.75
"""Edges ask again every 50-200 ms, each time at any of the routers."""


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    model: str
    tier: str
    weights: str


class Resumes:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: dict[str, _Asked] = {}

    def unplaced(self, job: Job) -> None:
        """No worker takes it now. A suspect waits for a worker of its own, and holds nobody back."""
        if not job.suspect:
            self._asked[job.job] = _Asked(self._clock.monotonic(), job.model, job.tier, job.weights)

    def placed(self, job: Job) -> None:
        self._asked.pop(job.job, None)

    def left_for(self, model: str, tier: str, pools: Collection[Pool]) -> list[Pool]:
        """The pools that new work of `tier` may have: not those that a resume of the same or a higher tier waits for."""
        oldest = self._clock.monotonic() - FRESH_S
        self._asked = {job: asked for job, asked in self._asked.items() if asked.at > oldest}
        wanted = {a.weights for a in self._asked.values() if a.model == model and rank(a.tier) <= rank(tier)}
        return [pool for pool in pools if pool.weights not in wanted]
