"""The rules that Headrace is compared with. Each places a job as soon as it arrives; workers queue without bound.

What is published of each is cited at its class. All see the cluster as it is, without delay, which flatters them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random

from bench.routing_world.cluster import Cluster
from bench.routing_world.job import SimJob


class _AtOnce:
    """Chooses a prefill and a decode worker when the job arrives."""

    changed = None

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.cluster: Cluster

    def begin(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def arrive(self, job: SimJob) -> None:
        self.cluster.place(job, self.choose_prefill(job), self.choose_decode(job))

    def overtook(self, job: SimJob) -> None:
        """No job is urgent here."""

    def freed(self, job: SimJob) -> None:
        """Nothing waits here."""

    def choose_prefill(self, job: SimJob) -> int:
        raise NotImplementedError

    def choose_decode(self, job: SimJob) -> int:
        raise NotImplementedError

    def prefill_runs(self, worker: int) -> int:
        """Requests that a prefill worker has and did not finish."""
        return self.cluster.prefill[worker].runs

    def decode_runs(self, worker: int) -> int:
        """Requests bound for a decode worker that did not finish."""
        return self.cluster.assigned[worker]


class RoundRobin(_AtOnce):
    """Each phase in turn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._count = 0

    def choose_prefill(self, job: SimJob) -> int:
        self._count += 1
        return self._count % len(self.cluster.prefill)

    def choose_decode(self, job: SimJob) -> int:
        return self._count % len(self.cluster.decode)


class Uniform(_AtOnce):
    """Random."""

    def choose_prefill(self, job: SimJob) -> int:
        return self.random.randrange(len(self.cluster.prefill))

    def choose_decode(self, job: SimJob) -> int:
        return self.random.randrange(len(self.cluster.decode))


class LeastLoaded(_AtOnce):
    """Fewest requests, ties at random."""

    def choose_prefill(self, job: SimJob) -> int:
        return self._least(len(self.cluster.prefill), self.prefill_runs)

    def choose_decode(self, job: SimJob) -> int:
        return self._least(len(self.cluster.decode), self.decode_runs)

    def _least(self, count: int, load: Callable[[int], float]) -> int:
        return min(range(count), key=lambda worker: (load(worker), self.random.random()))


class PowerOfTwo(_AtOnce):
    """The less loaded of two at random (Mitzenmacher, 2001)."""

    def choose_prefill(self, job: SimJob) -> int:
        return self._of_two(len(self.cluster.prefill), self.prefill_runs)

    def choose_decode(self, job: SimJob) -> int:
        return self._of_two(len(self.cluster.decode), self.decode_runs)

    def _of_two(self, count: int, load: Callable[[int], float]) -> int:
        two = self.random.sample(range(count), min(2, count))
        return min(two, key=load)


class Dynamo(LeastLoaded):
    """NVIDIA Dynamo's KV router, its default weights (credit 1.0, decay 0, prefill scale 1.0, request weight 0, temperature 0).

    `cost = max((active prefill tokens + prompt) / block - overlap, 0) + decode blocks`, the least wins, ties at random; in
    the decode stage of a disaggregated deployment the cost is the decode blocks alone. Source: dynamo `lib/kv-router`,
    `scheduling/selector/default.rs` and `scheduling/config.rs`, 1.6. Its index is exact here: the workers' caches themselves.
    Like its slot manager it counts a job's whole prompt, less what it matched when it was placed, until prefill ends, and
    a job's blocks on a prefill worker as active for as long.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._charged: dict[int, tuple[int, float, int]] = {}
        self._tokens: list[float] = []
        self._blocks: list[float] = []
        self._decode_blocks: list[float] = []

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self._tokens = [0.0] * len(cluster.prefill)
        self._blocks = [0.0] * len(cluster.prefill)
        self._decode_blocks = [0.0] * len(cluster.decode)
        prefilled, done = cluster._prefilled, cluster._done

        def on_prefilled(job: SimJob) -> None:
            worker, tokens, blocks = self._charged.pop(job.number)
            self._tokens[worker] -= tokens
            self._blocks[worker] -= blocks
            prefilled(job)

        def on_done(job: SimJob, now: float) -> None:
            self._decode_blocks[job.decode] -= self._size(job)
            done(job, now)

        for prefill in cluster.prefill:
            prefill._done = on_prefilled
        for decode in cluster.decode:
            decode._done = on_done

    def choose_prefill(self, job: SimJob) -> int:
        block = self.cluster.block
        hits = [worker.hit(job) for worker in self.cluster.prefill]
        size = self._size(job)

        def cost(worker: int) -> float:
            raw = (self._tokens[worker] + job.prompt) / block
            return max(raw - hits[worker], 0.0) + self._blocks[worker] + size

        chosen = self._least(len(hits), cost)
        uncached = job.prompt - hits[chosen] * block
        self._charged[job.number] = (chosen, uncached, size)
        self._tokens[chosen] += uncached
        self._blocks[chosen] += size
        return chosen

    def choose_decode(self, job: SimJob) -> int:
        chosen = self._least(len(self._decode_blocks), self._decode_blocks.__getitem__)
        self._decode_blocks[chosen] += self._size(job)
        return chosen

    def _size(self, job: SimJob) -> int:
        return math.ceil(job.prompt / self.cluster.block)


class SGLang(LeastLoaded):
    """SGLang's gateway, policy `cache_aware` with its defaults, for both phases.

    Imbalanced when (most - fewest) > 64 and most > 1.5 x fewest requests: the fewest wins. Else the worker whose approximate
    tree matches more than 0.3 of the prompt wins, the best match; else the one with the smallest tree. The tree holds what
    was routed there, and what was not used for 120 s goes. Source: sglang `model_gateway/src/policies/cache_aware.rs`,
    `main.rs`, 0.5.
    """

    THRESHOLD, ABSOLUTE, RELATIVE, EVICT_S = 0.3, 64, 1.5, 120.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._prefill: list[_Tree] = []
        self._decode: list[_Tree] = []

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self._prefill = [_Tree(self.EVICT_S) for _ in cluster.prefill]
        self._decode = [_Tree(self.EVICT_S) for _ in cluster.decode]

    def choose_prefill(self, job: SimJob) -> int:
        return self._choose(job, self._prefill, self.prefill_runs)

    def choose_decode(self, job: SimJob) -> int:
        return self._choose(job, self._decode, self.decode_runs)

    def _choose(self, job: SimJob, trees: Sequence[_Tree], load: Callable[[int], float]) -> int:
        now = self.cluster.now
        loads = [load(worker) for worker in range(len(trees))]
        for tree in trees:
            tree.evict(now)
        most, fewest = max(loads), min(loads)
        if most - fewest > self.ABSOLUTE and most > self.RELATIVE * fewest:
            chosen = self._least(len(trees), load)
        else:
            matches = [tree.match(job.blocks) * self.cluster.block / job.prompt for tree in trees]
            best = max(matches)
            if best > self.THRESHOLD:
                chosen = self._least(len(trees), lambda worker: -matches[worker])
            else:
                chosen = self._least(len(trees), lambda worker: trees[worker].size)
        trees[chosen].add(job, now, self.cluster.block)
        return chosen


class _Tree:
    """What was routed to one worker: blocks by the time of their last use, and a size in tokens."""

    def __init__(self, evict_s: float) -> None:
        self._used: OrderedDict[bytes | int, tuple[float, int]] = OrderedDict()
        self._evict_s = evict_s
        self.size = 0

    def match(self, blocks: Sequence[bytes]) -> int:
        count = 0
        for name in blocks:
            if name not in self._used:
                break
            count += 1
        return count

    def add(self, job: SimJob, now: float, block: int) -> None:
        parts: list[tuple[bytes | int, int]] = [(name, block) for name in job.blocks]
        parts.append((job.number, job.prompt - len(job.blocks) * block))
        for name, tokens in parts:
            if name not in self._used:
                self.size += tokens
            self._used[name] = (now, tokens)
            self._used.move_to_end(name)

    def evict(self, now: float) -> None:
        while self._used:
            name = next(iter(self._used))
            used, tokens = self._used[name]
            if used > now - self._evict_s:
                return
            del self._used[name]
            self.size -= tokens
