"""The simulated cluster: a virtual clock, workers, and one policy that says who runs what."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.routing_world.decode import DecodeWorker
from bench.routing_world.job import SimJob
from bench.routing_world.prefill import Changed, PrefillWorker
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import TRACE_BLOCK, Row


class Policy(Protocol):
    """Gets every job once, and gives it to workers of the cluster it was made for, now or later; or refuses it."""

    @property
    def changed(self) -> Changed | None:
        """Wants to hear what workers cache."""
        ...

    def begin(self, cluster: Cluster) -> None: ...

    def arrive(self, job: SimJob) -> None: ...

    def overtook(self, job: SimJob) -> None:
        """The prefill worker of `job` computes something else than before, and has not ended it."""
        ...

    def freed(self, job: SimJob) -> None:
        """A worker of `job` finished with it."""
        ...


class Cluster:
    def __init__(self, world: World, limits: Limits, policy: Policy) -> None:
        self.world, self.limits, self.policy = world, limits, policy
        self.now = 0.0
        self.block = TRACE_BLOCK
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.prefill = [self._prefill(f"p{number}-0") for number in range(world.prefill_workers)]
        self.decode = [self._decode(f"d{number}-0") for number in range(world.decode_workers)]
        self.assigned = [0] * world.decode_workers
        self.coming_tokens = [0] * world.decode_workers
        policy.begin(self)

    def run(self, rows: Sequence[Row], load: float) -> list[SimJob]:
        """Every row, `load` times as fast as it was recorded, until all have ended. What no decode worker could ever hold is
        refused before anybody places it: an edge knows its model's context."""
        jobs = [SimJob(row, row.at / load, number) for number, row in enumerate(rows)]
        for job in jobs:
            job.refused = not self._holds(job)
            if not job.refused:
                self.at(job.arrived, lambda job=job: self.policy.arrive(job))  # type: ignore[misc]
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        return jobs

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, call))

    def place(self, job: SimJob, prefill: int, decode: int) -> None:
        """Compute the prompt on one worker, decode on another."""
        job.prefill, job.decode = prefill, decode
        self.assigned[decode] += 1
        self.coming_tokens[decode] += job.prompt
        self.prefill[prefill].submit(job, self.now)

    def place_alone(self, job: SimJob, decode: int) -> None:
        """A decode worker computes the prompt's tail itself."""
        job.decode = decode
        self.assigned[decode] += 1
        self.coming_tokens[decode] += job.prompt
        self.decode[decode].prefill(job, self.now)

    def _holds(self, job: SimJob) -> bool:
        """Its blocks and one to write next, as a router counts them, and each token of its answer."""
        blocks = self.world.decode_kv // self.block
        return -(-job.prompt // self.block) < blocks and job.prompt + job.row.output <= self.world.decode_kv

    def _prefilled(self, job: SimJob) -> None:
        self.decode[job.decode].join(job, self.now)
        self.policy.freed(job)

    def _first(self, job: SimJob, now: float) -> None:
        job.ttft = now - job.arrived
        self.coming_tokens[job.decode] -= job.prompt

    def _done(self, job: SimJob, now: float) -> None:
        job.finished = now
        self.assigned[job.decode] -= 1
        self.policy.freed(job)

    def _prefill(self, process: str) -> PrefillWorker:
        world = self.world
        blocks = world.prefill_cache // self.block
        policy = self.policy
        return PrefillWorker(process, world, blocks, self.block, self.at, self._prefilled, policy.overtook, policy.changed)

    def _decode(self, process: str) -> DecodeWorker:
        return DecodeWorker(process, self.world, self.block, self.at, self._first, self._done, self.policy.changed)
