"""Many workers and many placements a second, on the virtual clock: `python -m bench.router_scale`.

The simulated cluster of `bench/routing_world` with the router's own code, ten placements a second and worker: 10,000 a second at
1,000 workers. Half are prefill workers at 60 % of what they compute; half of the prompts begin with one of as many prefixes as
there are workers. Prints what came of it, and how long one core took for it: of the router's part, and with the workers that are
simulated; plots both by the number of workers into bench/out. Returns 1 when a worker was ever above its cap.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from bench.routing_world.cluster import Cluster
from bench.routing_world.job import SimJob
from bench.routing_world.measure import measure
from bench.routing_world.ours import Ours
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import TRACE_BLOCK, Row
from services.router.placement import Local, Pair

WORKERS = (16, 64, 256, 1000)
RATE = 10.0
"""Placements a second and worker."""
OUTPUT = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """`placements_s`: of the virtual clock. `router_s`, `real_s`: what one of its seconds took. `most`: sequences at a worker."""

    workers: int
    placements_s: float
    good: float
    refused: float
    ttft_p50: float
    ttft_p99: float
    hit_rate: float
    most: int
    router_s: float
    real_s: float


class _Timed(Ours):
    """How long the router's part takes, and the most sequences that a decode worker ever had."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seconds, self.most = 0.0, 0

    def arrive(self, job: SimJob) -> None:
        started = time.perf_counter()
        super().arrive(job)
        self.seconds += time.perf_counter() - started

    def freed(self, job: SimJob) -> None:
        started = time.perf_counter()
        super().freed(job)
        self.seconds += time.perf_counter() - started

    def _give(self, job: SimJob, decision: Pair | Local) -> None:
        super()._give(job, decision)
        self.most = max(self.most, self.cluster.assigned[job.decode])


def arrivals(workers: int, seconds: float, seed: int) -> list[Row]:
    """Poisson, 10 a second and worker, 256 to 1,536 tokens; every second one begins with a prefix that others have."""
    random, rows, at = Random(seed), list[Row](), 0.0
    prefixes = [random.randbytes(16) for _ in range(workers)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(workers)))
    while (at := at + random.expovariate(RATE * workers)) < seconds:
        prompt = random.randint(TRACE_BLOCK // 2, 3 * TRACE_BLOCK)
        names = [random.randbytes(16) for _ in range(prompt // TRACE_BLOCK)]
        if names and random.random() < 0.5:
            names[0] = random.choices(prefixes, cum_weights=weights)[0]
        rows.append(Row(at, prompt, OUTPUT, tuple(names), 0))
    return rows


def scale(workers: int, seconds: float, seed: int) -> Scale:
    """`workers` for so many virtual seconds."""
    world, limits, policy = World(prefill_workers=workers // 2, decode_workers=workers // 2), Limits(), _Timed(seed)
    rows = arrivals(workers, seconds, seed)
    started = time.perf_counter()
    jobs = Cluster(world, limits, policy).run(rows, load=1.0)
    real = time.perf_counter() - started
    found = measure("ours", 1.0, jobs, limits)
    return Scale(
        workers=workers,
        placements_s=sum(not job.refused for job in jobs) / seconds,
        good=found.good,
        refused=found.refused,
        ttft_p50=found.ttft_p50,
        ttft_p99=found.ttft_p99,
        hit_rate=found.hit_rate,
        most=policy.most,
        router_s=policy.seconds / seconds,
        real_s=real / seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_scale")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the virtual clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for workers in options.workers:
        results.append(found := scale(workers, options.seconds, options.seed))
        print(
            f"{workers:5d} workers: {found.placements_s:6.0f} placements/s, {found.good:.1%} good, {found.refused:.1%} refused, "
            f"TTFT p50 {1000 * found.ttft_p50:.0f} ms, p99 {1000 * found.ttft_p99:.0f} ms, {found.hit_rate:.0%} cached, "
            f"at most {found.most} of {World().batch} sequences; "
            f"a second took {found.real_s:.2f} s, {found.router_s:.2f} s of it the router",
            flush=True,
        )
    (options.out / "router-scale.json").write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    _plot(results, options.out / "router-scale.png")
    return int(any(result.most > World().batch for result in results))


def _plot(results: Sequence[Scale], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    workers = [result.workers for result in results]
    axis.plot(workers, [1e6 * result.router_s / result.placements_s for result in results], marker="o", label="router")
    axis.plot(workers, [1e6 * result.real_s / result.placements_s for result in results], marker="o", label="and workers")
    axis.set_xscale("log")
    axis.set_xlabel("workers")
    axis.set_ylabel("microseconds of one core a placement")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
