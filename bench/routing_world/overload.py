"""Twice the load that saturates, with tiers: who is served, how late, and whether a Retry-After is true.

The router's own admission (`services.router.gate`) before the simulated workers. Tiers come by seed, tenants as ever. Who is
turned away is imagined to ask again and again, and nothing comes of it: when it would have been let in, over what it was told,
is the truth of a Retry-After.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from bench.routing_world.cluster import Cluster
from bench.routing_world.job import SimJob
from bench.routing_world.measure import measure, quantile
from bench.routing_world.ours import Ours
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import Row
from schemas.job import Tier
from services.router.admission import TurnedAway

SHARES = {Tier.ENTERPRISE: 0.1, Tier.PAID: 0.4, Tier.FREE: 0.5}
LOADS = (0.1, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
PROBE_S = 0.05


@dataclass(frozen=True, slots=True)
class TierResult:
    """`good`, `refused`: shares of those that came."""

    tier: Tier
    jobs: int
    good: float
    refused: float
    ttft_p50: float
    ttft_p99: float


@dataclass(frozen=True, slots=True)
class Overload:
    """`truths`: for each refusal, in order, seconds until it would have been let in over its Retry-After."""

    load: float
    goodput: float
    tiers: tuple[TierResult, ...]
    truths: tuple[float, ...] = field(repr=False)

    @property
    def truth(self) -> float:
        """The median; 1 = every Retry-After was exact, or there was none."""
        return quantile(self.truths, 0.5) if self.truths else 1.0

    def of(self, tier: Tier) -> TierResult:
        return next(found for found in self.tiers if found.tier is tier)


class _Probed(Ours):
    """Asks again for everybody who was turned away."""

    def __init__(self, seed: int, tiers: Sequence[Tier]) -> None:
        super().__init__(seed, tiers=tiers)
        self.truths: list[float] = []

    def turned_away(self, job: SimJob, away: TurnedAway) -> None:
        super().turned_away(job, away)
        self._ask_later(job, self.cluster.now, away.retry_after)

    def _ask_later(self, job: SimJob, told_at: float, retry_after: float) -> None:
        cluster = self.cluster

        def again() -> None:
            if self.would_enter(job):
                self.truths.append((cluster.now - told_at) / retry_after)
            else:
                self._ask_later(job, told_at, retry_after)

        cluster.at(cluster.now + PROBE_S, again)


def draw_tiers(count: int, seed: int) -> list[Tier]:
    """A tier for each of `count` jobs."""
    return Random(seed).choices(list(SHARES), weights=list(SHARES.values()), k=count)


def overload(rows: Sequence[Row], world: World, limits: Limits, peak: float, load: float, seed: int) -> Overload:
    """The trace at `load`, where 1.0 plays it `peak` times as fast as it was recorded."""
    tiers = draw_tiers(len(rows), seed)
    policy = _Probed(seed, tiers)
    jobs = Cluster(world, limits, policy).run(rows, peak * load)
    found = tuple(_tier(tier, [job for job in jobs if tiers[job.number] is tier], limits) for tier in Tier)
    return Overload(load, measure("ours", load, jobs, limits).goodput, found, tuple(sorted(policy.truths)))


def _tier(tier: Tier, jobs: Sequence[SimJob], limits: Limits) -> TierResult:
    result = measure(tier.value, 0.0, jobs, limits)
    return TierResult(tier, len(jobs), result.good, result.refused, result.ttft_p50, result.ttft_p99)


def targets(results: Sequence[Overload], world: World) -> list[tuple[str, bool]]:
    """What issue 5 asks of overload: each target with its figures, and whether it is met. `results`: one for each of `LOADS`."""
    quiet, twice = results[0], results[-1]
    peak = max(result.goodput for result in results) or 1.0
    calm, late = (result.of(Tier.ENTERPRISE).ttft_p99 for result in (quiet, twice))
    most = 1.2 * calm + world.queue_step
    return [
        (f"goodput at 2.0 is {twice.goodput / peak:.1%} of its peak (at least 90 %)", twice.goodput >= 0.9 * peak),
        (f"enterprise TTFT p99 {late:.2f} s at 2.0, {calm:.2f} s at 0.1 (at most {most:.2f} s)", late <= most),
        (f"time until let in over Retry-After, median {twice.truth:.2f} (0.7 to 1.3)", 0.7 <= twice.truth <= 1.3),
    ]
