"""Two routers, one of which sees the workers as they were some seconds ago: the workers' refusals bound what that does.

Jobs come to either in turn. A worker asked for more than it has credit for refuses, as real ones do, and its router tries the
next best; whom nobody takes waits for the router that sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.routing_world.cluster import Cluster
from bench.routing_world.job import SimJob
from bench.routing_world.ours import Ours
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import Row
from services.router.placement import Local, Pair, place
from services.router.placement_survey import has_decode_credit, has_prefill_credit
from services.router.placement_workers import Pool, pools

LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Caps:
    """`asked`: placements that the late router tried, `refused` those that a worker refused. The most a worker ever had, and may
    have: sequences of a decode worker, prompts that wait at a prefill worker with more than a step's work before them."""

    asked: int
    refused: int
    sequences: int
    batch: int
    over_a_step: int


class Stale(Ours):
    def __init__(self, seed: int, age_s: float) -> None:
        super().__init__(seed)
        self._age_s = age_s
        self._seen: deque[tuple[float, list[Pool]]] = deque()
        self.asked = self.refused = self.sequences = self.over_a_step = 0

    def arrive(self, job: SimJob) -> None:
        self._look()
        if job.number % 2 or not self._place_late(job):
            super().arrive(job)

    def _look(self) -> None:
        now = self.cluster.now
        if not self._seen or now - self._seen[-1][0] >= LOOK_S:
            self._seen.append((now, pools(list(self._pool.workers()))))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._age_s:
            self._seen.popleft()

    def _place_late(self, job: SimJob) -> bool:
        at, seen = self._seen[0]
        without = frozenset[str]()
        request = self._request(job, patience=0.0)
        while isinstance(decision := place(seen, request, at, self._random, without), Pair | Local):
            self.asked += 1
            who = self._refuses(job, decision)
            if not who:
                self._give(job, decision)
                return True
            self.refused += 1
            without |= {who}
        return False

    def _refuses(self, job: SimJob, decision: Pair | Local) -> str:
        """The worker that has no credit for it in truth."""
        self._see_decode(self.cluster.decode[self._decode[decision.decode]])
        decode = self._pool.decode[decision.decode]
        if not has_decode_credit(decode, decision.blocks):
            return decision.decode
        first = self._pool.prefill[decision.prefill] if isinstance(decision, Pair) else decode
        return "" if has_prefill_credit(first, decision.uncached, job.urgent) else first.process

    def _give(self, job: SimJob, decision: Pair | Local) -> None:
        super()._give(job, decision)
        self.sequences = max(self.sequences, *self.cluster.assigned)
        step = self.cluster.world.queue_step * self.cluster.world.prefill_rate
        self.over_a_step += sum(len(worker.queue) > 1 and worker.queued_tokens > step for worker in self.cluster.prefill)


def caps(rows: Sequence[Row], world: World, limits: Limits, speed: float, seed: int, age_s: float = 5.0) -> Caps:
    """The trace played `speed` times as fast as it was recorded, before two routers."""
    policy = Stale(seed, age_s)
    Cluster(world, limits, policy).run(rows, speed)
    return Caps(policy.asked, policy.refused, policy.sequences, world.batch, policy.over_a_step)
