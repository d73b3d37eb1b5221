"""A simulated prefill worker: one prompt after another at a fixed rate, with a prefix cache of fixed size (LRU).

Events: one a prompt, and one when an urgent prompt takes another one's turn: at the end of the step in progress, as in
`services.engine.scheduler`. Left out: what the scheduler gives of each step to much shorter prompts behind a long one. A
prompt's hit is decided when it begins, its full blocks are cached when it ends.
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
        self.queue: list[SimJob] = []
        self.busy: SimJob | None = None
        self.busy_until = 0.0
        self._step = world.queue_step
        self._began = 0.0
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
        return len(self.queue) + (self.busy is not None)

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
        self.queue.append(job)
        if self.busy is None:
            self._begin(now)
        elif self._turns[job] < self._turns[self.busy]:
            step_ends = self._began + math.ceil((now - self._began) / self._step) * self._step
            if step_ends < self.busy_until:
                self._then(step_ends, self._switch)

    def makes_way(self, now: float) -> int:
        """How many of those that wait would be computed after an urgent prompt that comes `now`."""
        return sum(self._turns[job] > now for job in self.queue)

    def work(self, now: float, urgent: bool = False) -> float:
        """Seconds of what it has to compute before a prompt that comes `now`, as far as its router knows."""
        turn = now if urgent else now + AHEAD_S
        queued = (self._left_of(job) for job in self.queue if self._turns[job] <= turn)
        busy = 0.0
        if self.busy is not None:
            busy = self.busy_until - now
            if self._turns[self.busy] > turn:
                busy = min(busy, self._step)
        return busy + sum(queued)

    def _left_of(self, job: SimJob) -> float:
        return self._left.get(job, job.placed_uncached / self.rate)

    def _begin(self, now: float) -> SimJob:
        job = self.busy = min(self.queue, key=self._turns.__getitem__)
        self.queue.remove(job)
        if job not in self._left:
            job.uncached = job.prompt - self.hit(job) * self._block
        self._began, self.busy_until = now, now + self._left.pop(job, job.uncached / self.rate)
        self._then(self.busy_until, self._end)
        return job

    def _then(self, when: float, call: Callable[[float], None]) -> None:
        """`call` at `when`, unless something else is to be done before."""
        self._changes += 1
        change = self._changes
        self._at(when, lambda: call(when) if change == self._changes else None)

    def _switch(self, now: float) -> None:
        """The prompt in progress waits, with what it has."""
        waits = self.busy
        assert waits is not None
        self._left[waits] = self.busy_until - now
        self.queue.append(waits)
        self._overtook(self._begin(now))

    def _end(self, now: float) -> None:
        job = self.busy
        assert job is not None
        self.busy = None
        del self._turns[job]
        self._keep(job.blocks)
        if self.queue:
            self._begin(now)
        self._done(job)

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
