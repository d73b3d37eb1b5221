"""Headrace's own rule: the router's code, `services.router`, before the simulated workers.

Placement (`placement`), the prefix index, and the turn of lanes (`lanes`) are the real ones, with tiers also admission (`gate`).
Workers queue one step's work at most; what nobody has credit for waits, and a job that can no longer have its first token in time
is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

from bench.routing_world.cluster import Cluster
from bench.routing_world.decode import DecodeWorker
from bench.routing_world.job import SimJob
from bench.routing_world.prefill import PrefillWorker
from schemas.job import LANES, Tier
from schemas.state import Role
from services.router.admission import Left, TurnedAway, at_worker, late
from services.router.gate import Gate
from services.router.lanes import Tiers, charge, next_turn, note, rank
from services.router.placement import Local, NoCredit, Pair, place
from services.router.placement_request import PATIENCE_S, Request
from services.router.placement_workers import Pool, Worker
from services.router.prefix_index import PrefixIndex


class Ours:
    """`tiers`: of each job, by its number; without, all are paid and nobody is kept from waiting."""

    def __init__(
        self, seed: int, *, refuse: bool = True, patience: float = PATIENCE_S, tiers: Sequence[Tier] | None = None
    ) -> None:
        self._random = Random(seed)
        self._refuse = refuse
        self._patience = patience
        self._tier_of = tiers
        self.gate = Gate()
        self._lanes: dict[Tier, dict[int, deque[SimJob]]] = {tier: {lane: deque() for lane in range(LANES)} for tier in Tier}
        self._tiers: Tiers = {}
        self._index = PrefixIndex()
        self.cluster: Cluster

    def begin(self, cluster: Cluster) -> None:
        self.cluster = cluster
        world = cluster.world
        self._pool = Pool("kv", "w", cluster.block, 1 / world.prefill_rate)
        self._prefill = {worker.process: n for n, worker in enumerate(cluster.prefill)}
        self._decode = {worker.process: n for n, worker in enumerate(cluster.decode)}
        for prefill in cluster.prefill:
            self._see_prefill(prefill)
        for decode in cluster.decode:
            self._see_decode(decode)

    def changed(self, process: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._index.stored(process, stored)
        self._index.removed(process, removed)

    def arrive(self, job: SimJob) -> None:
        tier, lane = self.tier(job), job.row.tenant % LANES
        job.urgent = tier is Tier.ENTERPRISE
        if self._tier_of is not None:
            self.gate.sees(self.waiting, self.cluster.now)
            away = self.gate.enter(tier, lane, self.waiting, self.left(job), self.cluster.now)
            if away is not None:
                self.turned_away(job, away)
                return
        ahead = any(rank(other) <= rank(tier) for other in self.waiting)
        if ahead or not self._try(job):
            self._lanes[tier][lane].append(job)
            self.gate.sees(self.waiting, self.cluster.now)
            self._round()

    def would_enter(self, job: SimJob) -> bool:
        """Whether the same request would be let in if it came now."""
        limits, now = self.cluster.limits, self.cluster.now
        fresh = Left(queue_s=limits.ttft)
        self.gate.sees(self.waiting, now)
        if self.gate.ask(self.tier(job), job.row.tenant % LANES, self.waiting, fresh, now) is not None:
            return False
        request = self._request(job, self._patience)
        decision = place((self._pool,), request, now, self._random)
        if not isinstance(decision, Pair | Local):
            return True  # it would wait
        assert decision.why is not None
        return not late(decision.why, Left(first_token_s=limits.first_token(decision.uncached)))

    def turned_away(self, job: SimJob, away: TurnedAway) -> None:
        job.refused = True

    def overtook(self, job: SimJob) -> None:
        self._see_prefill(self.cluster.prefill[job.prefill])
        self._round()

    def freed(self, job: SimJob) -> None:
        if job.prefill >= 0:
            self._see_prefill(self.cluster.prefill[job.prefill])
        self._see_decode(self.cluster.decode[job.decode])
        self._round()

    def tier(self, job: SimJob) -> Tier:
        return self._tier_of[job.number] if self._tier_of is not None else Tier.PAID

    @property
    def waiting(self) -> dict[str, dict[int, int]]:
        """Jobs that wait, by tier and lane, without empty ones."""
        found = {tier.value: {lane: len(jobs) for lane, jobs in lanes.items() if jobs} for tier, lanes in self._lanes.items()}
        return {tier: lanes for tier, lanes in found.items() if lanes}

    def left(self, job: SimJob) -> Left:
        """The queue may take what a prompt of no length is allowed."""
        waited = self.cluster.now - job.arrived
        return Left(queue_s=self.cluster.limits.ttft - waited)

    def _round(self) -> None:
        """What the router's queue path does: one job after another while credit is in view."""
        passed: set[tuple[str, int]] = set()
        now = self.cluster.now
        while True:
            waiting = self.waiting
            rest = {tier: {lane: n for lane, n in lanes.items() if (tier, lane) not in passed} for tier, lanes in waiting.items()}
            if not any(rest.values()) or not self._credit():
                return
            self._tiers = note(self._tiers, waiting, now)
            turn = next_turn(self._tiers, rest, now)
            if turn is None:
                return
            line = self._lanes[Tier(turn.tier)][turn.lane]
            job = line[0]
            if self._try(job):
                line.popleft()
                self._tiers = charge(turn.tiers, turn.tier, turn.lane, job.placed_uncached)
                self.gate.placed(turn.tier, now)
                self.gate.sees(self.waiting, now)
            else:
                passed.add((turn.tier, turn.lane))

    def _credit(self) -> bool:
        return isinstance(place((self._pool,), Request(tokens=1), self.cluster.now, self._random), Pair | Local)

    def _try(self, job: SimJob) -> bool:
        """Placed, or refused."""
        now = self.cluster.now
        waited = now - job.arrived
        request = self._request(job, self._patience - waited)
        decision = place((self._pool,), request, now, self._random)
        if isinstance(decision, NoCredit):
            return False
        assert isinstance(decision, Pair | Local), decision
        assert decision.why is not None
        limit = self.cluster.limits.first_token(decision.uncached)
        left = Left(first_token_s=limit - waited, anew_s=limit)
        if self._tier_of is not None:
            said = at_worker(self.tier(job), decision.why, left)
            if isinstance(said, TurnedAway):
                self.turned_away(job, said)
                return True
            if said is not None:
                return False
        elif self._refuse and decision.why.ttft_s > left.first_token_s:
            job.refused = True
            return True
        self._give(job, decision)
        return True

    def _give(self, job: SimJob, decision: Pair | Local) -> None:
        now = self.cluster.now
        job.placed_uncached = decision.uncached
        if isinstance(decision, Pair):
            prefill, decode = self._prefill[decision.prefill], self._decode[decision.decode]
            self.cluster.place(job, prefill, decode)
            self._index.expect(decision.prefill, job.blocks, now)
            self._see_prefill(self.cluster.prefill[prefill])
        else:
            decode = self._decode[decision.decode]
            self.cluster.place_alone(job, decode)
        self._index.expect(decision.decode, job.blocks, now)
        self._index.clear_some()
        self._see_decode(self.cluster.decode[decode])

    def _request(self, job: SimJob, patience: float) -> Request:
        hits = self._index.hits(job.blocks)
        return Request(tokens=job.prompt, hits=hits, patience=patience, urgent=job.urgent)

    def _see_prefill(self, worker: PrefillWorker) -> None:
        world, now = self.cluster.world, self.cluster.now
        work = worker.work(now)
        self._pool.put(
            Worker(
                worker.process,
                Role.PREFILL,
                "kv",
                "w",
                10**9,
                self.cluster.block,
                10**9,
                queued=len(worker.queue),
                running=worker.runs - len(worker.queue),
                prefill_tokens=max(0, int(world.queue_step * worker.rate - worker.queued_tokens)),
                free_at=now + work,
                yield_s=work - worker.work(now, urgent=True),
                yield_queued=worker.makes_way(now),
                token_s=1 / worker.rate,
            )
        )

    def _see_decode(self, worker: DecodeWorker) -> None:
        world, cluster = self.cluster.world, self.cluster
        number = self._decode[worker.process]
        pace = world.step + world.step_per_sequence * worker.running
        tail = sum(int(left) for left, _ in worker.tails)
        budget = int((world.step_target - pace) * world.prefill_rate)
        self._pool.put(
            Worker(
                worker.process,
                Role.DECODE,
                "kv",
                "w",
                10**9,
                cluster.block,
                world.decode_kv // cluster.block,
                queued=len(worker.tails),
                running=worker.running,
                prefill_tokens=max(0, budget - tail),
                decode_slots=world.batch - cluster.assigned[number],
                kv_blocks=(worker.free - cluster.coming_tokens[number]) // cluster.block,
                free_at=cluster.now + tail / world.prefill_rate,
                token_s=1 / world.prefill_rate,
                step_s=pace,
            )
        )
