"""What one run of one policy came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.routing_world.job import SimJob
from bench.routing_world.settings import Limits


@dataclass(frozen=True, slots=True)
class Result:
    """Times in seconds, `goodput` in requests a second of the trace's length, shares from 0 to 1.

    `fairness`: Jain's index of the tenants' shares of good requests. `hit_rate`: of the prompt tokens of those that ran.
    """

    policy: str
    load: float
    goodput: float
    good: float
    refused: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    hit_rate: float
    fairness: float


def measure(policy: str, load: float, jobs: Sequence[SimJob], limits: Limits) -> Result:
    """All of nobody is good. Raises AssertionError when a job neither ended nor was refused."""
    ran = [job for job in jobs if not job.refused]
    assert all(job.finished >= 0 for job in ran), "a job was lost"
    good = {job.number for job in ran if job.ttft <= limits.first_token(job.uncached) and job.gap_p95 <= limits.itl}
    span = max((job.arrived for job in jobs), default=0.0) or 1.0
    prompt = sum(job.prompt for job in ran)
    ttft, itl = sorted(job.ttft for job in ran), sorted(job.gap_p95 for job in ran if job.row.output > 1)
    return Result(
        policy=policy,
        load=load,
        goodput=len(good) / span,
        good=len(good) / len(jobs) if jobs else 1.0,
        refused=1 - len(ran) / len(jobs) if jobs else 0.0,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_p50=quantile(itl, 0.5),
        itl_p99=quantile(itl, 0.99),
        hit_rate=1 - sum(job.uncached for job in ran) / prompt if prompt else 0.0,
        fairness=_jain(jobs, good),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def _jain(jobs: Sequence[SimJob], good: set[int]) -> float:
    asked: dict[int, int] = defaultdict(int)
    served: dict[int, int] = defaultdict(int)
    for job in jobs:
        asked[job.row.tenant] += 1
        served[job.row.tenant] += job.number in good
    shares = [served[tenant] / count for tenant, count in asked.items()]
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
