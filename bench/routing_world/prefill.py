"""A simulated prefill worker: one prompt after another at a fixed rate, with a prefix cache of fixed size (LRU).

Events: one a prompt, and one when an urgent prompt takes another one's turn: at the end of the step in progress, as in
`services.engine.scheduler`. With `World.shorter_share` also one a step in which, as there, much shorter prompts come before the
rest of a long one. A prompt's hit is decided when it begins, its full blocks are cached when it ends.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from bench.routing_world.job import SimJob
from bench.routing_world.settings import World
from services.engine.scheduler import AHEAD_S

Changed = Callable[[str, Sequence[bytes], Sequence[bytes]], None]
"""(process, stored, removed): what a worker says of its cache."""


class PrefillWorker:
    """`at` schedules a call at a time; `done` gets each job whose prompt is computed, `overtook` each that took a turn."""

    def __init__(
        self,
        process: str,
        world: World,
        cache_blocks: int,
        block: int,
        at: Callable[[float, Callable[[], None]], None],
        done: Callable[[SimJob], None],
        overtook: Callable[[SimJob], None],
        changed: Changed | None,
    ) -> None:
        self.process = process
        self.rate = world.prefill_rate
        self.jobs: list[SimJob] = []
        self.busy_until = 0.0
        self._step = world.queue_step
        self._shorter = min(1.0, world.shorter_share) * world.queue_step
        self._began = 0.0
        self._shares: dict[SimJob, float] = {}
        """What is computed from `_began` to `busy_until`: seconds of each."""
        self._turns: dict[SimJob, float] = {}
        self._left: dict[SimJob, float] = {}
        self._changes = 0
        self._capacity = cache_blocks
        self._block = block
        self._at = at
        self._done = done
        self._overtook = overtook
        self._changed = changed
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    @property
    def runs(self) -> int:
        return len(self.jobs)

    @property
    def queue(self) -> list[SimJob]:
        """Those that wait, half computed or not."""
        return [job for job in self.jobs if job not in self._shares]

    @property
    def queued_tokens(self) -> float:
        """Uncomputed tokens of what waits, half computed or not, as far as its router knows."""
        return sum(self._left_of(job) for job in self.queue) * self.rate

    def hit(self, job: SimJob) -> int:
        """Leading blocks of `job` that are cached; the last token is always computed."""
        most = (job.prompt - 1) // self._block
        count = 0
        for name in job.blocks[:most]:
            if name not in self._cache:
                break
            count += 1
        return count

    def submit(self, job: SimJob, now: float) -> None:
        self._turns[job] = now if job.urgent else now + AHEAD_S
        self.jobs.append(job)
        if not self._shares:
            self._begin(now)
        elif self._shorter or self._turns[job] < min(self._turns[busy] for busy in self._shares):
            step_ends = self._began + math.ceil((now - self._began) / self._step) * self._step
            if step_ends < self.busy_until:
                self._then(step_ends, self._switch)

    def makes_way(self, now: float) -> int:
        """How many of those that wait would be computed after an urgent prompt that comes `now`."""
        return sum(self._turns[job] > now for job in self.queue)

    def work(self, now: float, urgent: bool = False) -> float:
        """Seconds of what it has to compute before a prompt that comes `now`, one after another, as far as its router knows."""
        turn, total = now if urgent else now + AHEAD_S, 0.0
        for job in self.jobs:
            left = self._left_of(job) - self._computed(job, now)
            if self._turns[job] <= turn:
                total += left
            elif job in self._shares:
                total += min(left, self._step)
        return total

    def _left_of(self, job: SimJob) -> float:
        return self._left.get(job, job.placed_uncached / self.rate)

    def _computed(self, job: SimJob, now: float) -> float:
        """Seconds of it since `_began`."""
        took = self.busy_until - self._began
        return self._shares.get(job, 0.0) * ((now - self._began) / took if took else 1.0)

    def _begin(self, now: float) -> None:
        """Whoever's turn it is, and with it who need not wait for all of it."""
        self._shares = self._share(min(self.jobs, key=self._turns.__getitem__))
        for job in self._shares:
            if job not in self._left:
                job.uncached = job.prompt - self.hit(job) * self._block
                self._left[job] = job.uncached / self.rate
        self._began, self.busy_until = now, now + sum(self._shares.values())
        self._then(self.busy_until, self._end)

    def _share(self, first: SimJob) -> dict[SimJob, float]:
        """Seconds of each: all of `first`, or one step with those that have at most half as much, the shortest before others."""
        left, theirs = self._length(first), self._shorter
        if not theirs or left <= self._step:
            return {first: left}
        lengths = ((self._length(job), job.number, job) for job in self.jobs if job.urgent or not first.urgent)
        shares = dict[SimJob, float]()
        for length, _, job in sorted(each for each in lengths if 2 * each[0] <= left):
            if theirs > 0:
                shares[job] = min(length, theirs)
                theirs -= shares[job]
        shares[first] = min(left, self._step - sum(shares.values())) if shares else left
        return shares

    def _length(self, job: SimJob) -> float:
        """Seconds that it takes from now on."""
        known = self._left.get(job)
        return (job.prompt - self.hit(job) * self._block) / self.rate if known is None else known

    def _then(self, when: float, call: Callable[[float], None]) -> None:
        """`call` at `when`, unless something else is to be done before."""
        self._changes += 1
        change = self._changes
        self._at(when, lambda: call(when) if change == self._changes else None)

    def _switch(self, now: float) -> None:
        """What is in progress waits, with what it has."""
        for job in self._shares:
            self._left[job] -= self._computed(job, now)
        self._begin(now)
        self._overtook(next(iter(self._shares)))

    def _end(self, now: float) -> None:
        ended = []
        for job, share in self._shares.items():
            self._left[job] -= share
            if not self._left[job]:
                ended.append(job)
        for job in ended:
            self.jobs.remove(job)
            del self._turns[job], self._left[job]
            self._keep(job.blocks)
        self._shares = {}
        if self.jobs:
            self._begin(now)
        for job in ended:
            self._done(job)
        if not ended:
            self._overtook(next(iter(self._shares)))

    def _keep(self, blocks: Sequence[bytes]) -> None:
        cache = self._cache
        stored = [name for name in blocks if name not in cache]
        for name in reversed(blocks):  # a chain's end is the least useful part of it
            cache[name] = None
            cache.move_to_end(name)
        removed = [cache.popitem(last=False)[0] for _ in range(max(0, len(cache) - self._capacity))]
        if self._changed is not None and (stored or removed):
            gone = set(removed)
            self._changed(self.process, [name for name in stored if name not in gone], removed)
