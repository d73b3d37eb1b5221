"""What one routing decision costs: `python -m bench.router_decision`. One core, the router's own code, no bus.

A decision is what the dispatcher does for one job before it asks a worker: hash the prompt as far as somebody has it, look it
up, survey every worker, choose, charge both workers. Half of the prompts share three quarters with what a quarter of the workers
has; the caches are full of other blocks. Prints p50 and p99 by workers and by prompt length, and with `--memory` what the prefix
index takes per million blocks; plots into bench/out. `--cpu` counts CPU time, for a machine that is busy otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from schemas.codec import SchemaRange
from schemas.identity import job_id, process_id
from schemas.job import Deadlines, Job, Sampling
from schemas.state import Capabilities, Credits, Rates, Role, WorkerState
from services.clock import ManualClock
from services.router.placement import Local, Pair, place
from services.router.placement_request import PATIENCE_S, Request
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.view import Charge, View

MODEL = "m"
KV = "kv"
WORKERS = (16, 64, 256, 1024)
TOKENS = (128, 512, 2048, 8192, 32768)
USUAL_WORKERS, USUAL_TOKENS = 256, 2048
MEMORY = ((64, 1, 1000), (64, 8, 1000), (1000, 3, 1))
"""Workers, how many of them have a block, how many blocks in a row are at the same ones."""
BLOCKS_EACH = 2000
"""Other blocks in the index, a worker."""


class Steady:
    """A bus that was never down."""

    def steady_for(self) -> float:
        return float("inf")


class Setting:
    def __init__(self, workers: int, tokens: int, seed: int) -> None:
        self.random, self.tokens = Random(seed), tokens
        self.view, self.index = View(ManualClock(), Steady()), PrefixIndex()
        self.processes = [process_id(f"w{n}", 1.7e9, self.random) for n in range(workers)]
        self.prefix = self._ids(tokens - tokens // 4)
        shared = list(Prompt(self._job(self.prefix)).chain(KV, 16))
        for number, process in enumerate(self.processes):
            self.view.observe(self._state(process, Role.PREFILL if number % 2 else Role.DECODE))
            self.index.stored(process, (self.random.randbytes(16) for _ in range(BLOCKS_EACH)))
            if number % 4 == 1:
                self.index.stored(process, shared)

    def job(self) -> Job:
        known = self.random.random() < 0.5
        return self._job(self.prefix + self._ids(self.tokens - len(self.prefix) // 4) if known else self._ids(self.tokens))

    def decide(self, job: Job) -> list[Charge]:
        prompt, view = Prompt(job), self.view
        pools = view.pools(MODEL)
        decision = place(pools, Request.of(job, prompt.hits(self.index, pools), PATIENCE_S), view.now(), self.random)
        assert isinstance(decision, Pair | Local), decision
        charges = [view.charge(decision.decode, slots=1, blocks=decision.blocks)]
        if isinstance(decision, Pair):
            charges.append(view.charge(decision.prefill, prefill_tokens=decision.uncached))
        return charges

    def note(self, job: Job, charges: list[Charge]) -> None:
        """What a dispatcher does around asking, and the answers. Not timed, nor is hashing what no look-up wanted."""
        blocks = tuple(Prompt(job).chain(KV, 16))
        for charge in charges:
            self.index.expect(charge.process, blocks, self.view.now())
            self.view.undo(charge)
            self.view.observe(self._state(charge.process, Role.DECODE if charge.slots else Role.PREFILL))
        self.index.clear_some()

    def _job(self, ids: bytes) -> Job:
        return Job(
            job=job_id(self.random),
            attempt=1,
            model=MODEL,
            prompt=ids,
            sampling=Sampling(seed=1, max_tokens=64),
            deadlines=Deadlines(stamp=1.7e9, total=600.0),
            reply_to="hr.reply.e",
            edge=process_id("e", 1.7e9, Random(1)),
            salt=b"salt",
        )

    def _ids(self, count: int) -> bytes:
        return self.random.randbytes(4 * count)  # any u32 is an id

    def _state(self, process: str, role: Role) -> WorkerState:
        return WorkerState(
            process=process,
            role=role,
            model=MODEL,
            kv_compat=KV,
            weights="w",
            schemas=SchemaRange(),
            capabilities=Capabilities(),
            credits=Credits(version=1, prefill_tokens=1200, decode_slots=self.random.randrange(8, 64), kv_blocks=20_000),
            sent=0.0,
            context_length=131_072,
            block_tokens=16,
            kv_total=40_000,
            backlog=self.random.randrange(20_000),
            rates=Rates(prefill_tokens_s=20_000 * self.random.uniform(0.9, 1.1), decode_step_s=0.02),
        )


def measure(workers: int, tokens: int, decisions: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of a decision: p50, p99."""
    setting, seconds = Setting(workers, tokens, seed=1), list[float]()
    gc.collect()
    gc.freeze()  # as the router does: what lives as long as the process is not walked again
    for _ in range(decisions):
        job = setting.job()
        started = clock()
        charges = setting.decide(job)
        seconds.append(clock() - started)
        setting.note(job, charges)
    seconds.sort()
    return {"workers": workers, "tokens": tokens, "p50": seconds[len(seconds) // 2], "p99": seconds[int(len(seconds) * 0.99)]}


def bound(workers: int) -> float:
    """Bytes a block of the prefix index, never more: an identity, its place in a dict that just grew, and a set of holders that
    no other block has, one bit a worker.
    """
    return 64 + 112 + 32 + 4 * (workers // 30 + 1)


def memory(workers: int, holders: int, alike: int, blocks: int = 1_000_000) -> float:
    """Bytes a block, the most while the index grows from half of `blocks` to all. So many have each, `alike` blocks the same."""
    random, index, worst = Random(1), PrefixIndex(), 0.0
    processes = [f"w{number}" for number in range(workers)]
    for process in processes:
        index.stored(process, [])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for stored in range(alike, blocks + 1, alike):
        names = [random.randbytes(16) for _ in range(alike)]
        for process in random.sample(processes, holders):
            index.stored(process, names)
        if 2 * stored >= blocks and stored % (blocks // 50) < alike:
            index.clear_some()
            worst = max(worst, (tracemalloc.get_traced_memory()[0] - before) / stored)
    tracemalloc.stop()
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_decision")
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--cpu", action="store_true", help="CPU time, not time on the wall")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [(workers, USUAL_TOKENS) for workers in options.workers] + [(USUAL_WORKERS, tokens) for tokens in options.tokens]
    results = []
    for workers, tokens in cases:
        results.append(measure(workers, tokens, options.decisions, time.thread_time if options.cpu else time.perf_counter))
        print(
            "{workers:5d} workers {tokens:6d} tokens: p50 {0:6.0f} us  p99 {1:6.0f} us".format(
                1e6 * results[-1]["p50"], 1e6 * results[-1]["p99"], workers=workers, tokens=tokens
            ),
            flush=True,
        )
    if options.memory:
        for case in MEMORY:
            print("prefix index, {} workers, {} have a block, {} blocks alike: ".format(*case), end="")
            print(f"{memory(*case):.0f} MB per million blocks, at most {bound(case[0]):.0f}", flush=True)
    (options.out / "router-decision.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    _plot(results, len(options.workers), options.out / "router-decision.png")
    return 0


def _plot(results: list[dict[str, float]], split: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, name, part in ((axes[0], "workers", results[:split]), (axes[1], "tokens", results[split:])):
        for quantile in ("p50", "p99"):
            axis.plot([row[name] for row in part], [1e6 * row[quantile] for row in part], marker="o", label=quantile)
        axis.set_xscale("log")
        axis.set_xlabel("workers" if name == "workers" else "prompt tokens")
        axis.set_ylabel("microseconds a decision")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
