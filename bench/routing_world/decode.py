"""A simulated decode worker: a batch in which every sequence gains one token a step, and a KV pool with a prefix cache.

The batch is exact between two events and costs none for a step: all its sequences advance alike, so a counter of steps, and for
each sequence the count at which it ends, say everything. A sequence joins at once instead of at the next step's border (at most
one step too early). A sequence's whole growth is reserved when it joins, so that there is no preemption; until slot and room are
there it waits, in order, and its first token does not count as sent: one that is followed by a stall is none.

A prompt's tail that is prefilled here makes the steps of the whole batch longer, by as much as the step target leaves.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable

from bench.routing_world.job import SimJob
from bench.routing_world.prefill import Changed
from bench.routing_world.settings import World

BIN_S = 0.001
BINS = 256
"""Token gaps are counted in bins of a millisecond; the last one holds all that are longer."""


class DecodeWorker:
    """`first` is called with each job that has its first token, `done` with each that ended."""

    def __init__(
        self,
        process: str,
        world: World,
        block: int,
        at: Callable[[float, Callable[[], None]], None],
        first: Callable[[SimJob, float], None],
        done: Callable[[SimJob, float], None],
        changed: Changed | None,
    ) -> None:
        self.process = process
        self.world = world
        self.running = 0
        self.promised = 0
        self.held = 0
        self.waiting: deque[SimJob] = deque()
        self.tails: deque[list[float]] = deque()
        self._tail_jobs: deque[SimJob] = deque()
        self._block = block
        self._at = at
        self._first = first
        self._done = done
        self._changed = changed
        self._refs: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._steps = 0.0
        self._seen = 0.0
        self._pace = world.step
        self._bins = [0.0] * BINS
        self._ends: list[tuple[float, int, SimJob]] = []
        self._version = 0

    # the KV pool

    @property
    def free(self) -> int:
        """Tokens that are free, or cached and not in use."""
        return self.world.decode_kv - self.held

    def hit(self, job: SimJob) -> int:
        """Leading blocks of `job` that are here."""
        count = 0
        for name in job.blocks[: (job.prompt - 1) // self._block]:
            if name not in self._refs and name not in self._idle:
                break
            count += 1
        return count

    def _hold(self, job: SimJob) -> None:
        stored = []
        for name in job.blocks:
            refs = self._refs.get(name, 0)
            self._refs[name] = refs + 1
            if not refs:
                self.held += self._block
                if name in self._idle:
                    del self._idle[name]
                else:
                    stored.append(name)
        self.held += self._private(job)
        self._evict(stored)

    def _let_go(self, job: SimJob) -> None:
        for name in reversed(job.blocks):
            refs = self._refs[name] - 1
            if refs:
                self._refs[name] = refs
            else:
                del self._refs[name]
                self._idle[name] = None
                self.held -= self._block
        self.held -= self._private(job)

    def _private(self, job: SimJob) -> int:
        return job.prompt - len(job.blocks) * self._block + job.row.output

    def _evict(self, stored: list[bytes]) -> None:
        most = max(0, self.free) // self._block
        removed = [self._idle.popitem(last=False)[0] for _ in range(max(0, len(self._idle) - most))]
        if self._changed is not None and (stored or removed):
            self._changed(self.process, stored, removed)

    # the batch

    def join(self, job: SimJob, now: float) -> None:
        """The job's prompt is computed: it decodes as soon as there is room."""
        self.waiting.append(job)
        self._admit(now)

    def prefill(self, job: SimJob, now: float) -> None:
        """Compute the uncached tail of `job` here, then decode it. The caller has promised it a slot and room."""
        job.uncached = job.prompt - self.hit(job) * self._block
        self._advance(now)
        self.tails.append([float(job.uncached), 0.0])
        self._tail_jobs.append(job)
        self._reschedule(now)

    def _admit(self, now: float) -> None:
        self._advance(now)
        while self.waiting and self.running < self.world.batch:
            job = self.waiting[0]
            new = sum(name not in self._refs for name in job.blocks) * self._block + self._private(job)
            if new > self.free and self.running:
                break
            self.waiting.popleft()
            self._hold(job)
            self.running += 1
            job.joined, job.histogram = now, self._bins.copy()
            heapq.heappush(self._ends, (self._steps + job.row.output - 1, job.number, job))
            self._first(job, now)
        self._reschedule(now)

    def _advance(self, now: float) -> None:
        if (self.running or self.tails) and now > self._seen:
            steps = (now - self._seen) / self._pace
            self._steps += steps
            self._bins[min(BINS - 1, int(self._pace / BIN_S))] += steps
            if self.tails:
                self.tails[0][0] -= steps * self.tails[0][1]
        self._seen = now

    def _reschedule(self, now: float) -> None:
        world = self.world
        self._pace = world.step + world.step_per_sequence * self.running
        until = self._ends[0][0] - self._steps if self._ends else float("inf")
        if self.tails:
            left = max(self.tails[0][0], 1e-6)
            most = max(16.0, (world.step_target - self._pace) * world.prefill_rate)
            chunk = self.tails[0][1] = min(left, most)
            self._pace += chunk / world.prefill_rate
            until = min(until, left / chunk)
        self._version += 1
        if until < float("inf"):
            version = self._version
            when = now + max(0.0, until) * self._pace
            self._at(when, lambda: self._event(version, when))

    def _event(self, version: int, now: float) -> None:
        if version != self._version:
            return
        self._advance(now)
        if self.tails and self.tails[0][0] <= 1e-3:
            self.tails.popleft()
            self.waiting.appendleft(self._tail_jobs.popleft())
        # No time is told, and no step counted, more finely than a float can: late in a trace an end would never be reached.
        reached = self._steps + max(1e-6, 2 * math.ulp(now) / self._pace + 2 * math.ulp(self._steps))
        ended = []
        while self._ends and self._ends[0][0] <= reached:
            ended.append(heapq.heappop(self._ends)[2])
        for job in ended:
            self.running -= 1
            self._let_go(job)
            self._measure(job, now)
        self._admit(now)
        for job in ended:
            self._done(job, now)

    def _measure(self, job: SimJob, now: float) -> None:
        gaps = job.row.output - 1
        if gaps > 0:
            job.gap_mean = (now - job.joined) / gaps
            counts = [after - before for after, before in zip(self._bins, job.histogram, strict=True)]
            left = 0.05 * sum(counts)
            position = BINS - 1
            while position and left >= counts[position]:
                left -= counts[position]
                position -= 1
            job.gap_p95 = (position + 1) * BIN_S
        job.histogram = []
