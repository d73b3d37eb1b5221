"""A simulated prefill worker: one prompt after another at a fixed rate, with a prefix cache of fixed size (LRU).

Events: one a prompt. A prompt's hit is decided when it begins, its full blocks are cached when it ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from bench.routing_world.job import SimJob

Changed = Callable[[str, Sequence[bytes], Sequence[bytes]], None]
"""(process, stored, removed): what a worker says of its cache."""


class PrefillWorker:
    """`at` schedules a call at a time; `done` gets each job whose prompt is computed."""

    def __init__(
        self,
        process: str,
        rate: float,
        cache_blocks: int,
        block: int,
        at: Callable[[float, Callable[[], None]], None],
        done: Callable[[SimJob], None],
        changed: Changed | None,
    ) -> None:
        self.process = process
        self.rate = rate
        self.queue: deque[SimJob] = deque()
        self.busy: SimJob | None = None
        self.busy_until = 0.0
        self._capacity = cache_blocks
        self._block = block
        self._at = at
        self._done = done
        self._changed = changed
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    @property
    def runs(self) -> int:
        return len(self.queue) + (self.busy is not None)

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
        self.queue.append(job)
        if self.busy is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        job = self.busy = self.queue.popleft()
        job.uncached = job.prompt - self.hit(job) * self._block
        self.busy_until = now + job.uncached / self.rate
        self._at(self.busy_until, self._end)

    def _end(self) -> None:
        job, now = self.busy, self.busy_until
        assert job is not None
        self.busy = None
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
