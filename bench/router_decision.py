"""What one routing decision costs: `python -m bench.router_decision`. One core, the router's own code, no bus.

A decision is what the dispatcher does for one job before it asks a worker: hash the prompt as far as somebody has it, look it
up, survey the workers, choose, charge both. Half of the prompts share three quarters with what a quarter of the workers has; the
caches are full of other blocks; eight workers are on each host. Prints p50 and p99 by workers and by prompt length; with
`--parts` what a decision is made of, and what noting the choice takes after it; with `--memory` what the prefix index takes per
million blocks; plots into bench/out.
`--cpu` counts CPU time, for a machine that is busy otherwise; `--first-sight`: of no prompt was the beginning hashed before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.flags import whole
from schemas.codec import SchemaRange
from schemas.identity import job_id, process_id
from schemas.job import Deadlines, Job, Sampling
from schemas.state import Capabilities, Credits, Rates, Role, WorkerState
from services.clock import ManualClock
from services.router.chains import Chains
from services.router.estimate import Charge
from services.router.placement import Local, Pair, place
from services.router.placement_request import PATIENCE_S, Request
from services.router.placement_workers import Pool
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.view import View
from services.telemetry.collector import keep_collections_short

MODEL = "m"
KV = "kv"
WORKERS = (16, 64, 256, 1024)
TOKENS = (128, 512, 2048, 8192, 32768)
USUAL_WORKERS, USUAL_TOKENS = 256, 2048
MEMORY = ((64, 1, 1000), (64, 8, 1000), (1000, 3, 1))
"""Workers, how many of them have a block, how many blocks in a row are at the same ones."""
BLOCKS_EACH = 2000
"""Other blocks in the index, a worker."""
ON_A_HOST = 8
CONTEXT = 131_072
PARTS = ("hashing", "look-up", "choice", "charges", "noting")


class Steady:
    """A bus that was never down."""

    def steady_for(self) -> float:
        return float("inf")


class Setting:
    def __init__(self, workers: int, tokens: int, seed: int, *, first_sight: bool = False) -> None:
        self.random, self.tokens, self.first_sight = Random(seed), tokens, first_sight
        self.chains = Chains()
        self.view, self.index = View(ManualClock(), Steady()), PrefixIndex()
        self.processes = [process_id(f"w{n}", 1.7e9, self.random) for n in range(workers)]
        self.hosts = {process: f"h{n // ON_A_HOST}" for n, process in enumerate(self.processes)}
        self.prefix = self._ids(tokens - tokens // 4)
        shared = list(Prompt(self._job(self.prefix)).chain(KV, 16))
        for number, process in enumerate(self.processes):
            self.view.observe(self._state(process, Role.PREFILL if number % 2 else Role.DECODE))
            self.index.stored(process, (self.random.randbytes(16) for _ in range(BLOCKS_EACH)))
            if number % 4 == 1:
                self.index.stored(process, shared)

    def job(self, known: bool | None = None) -> Job:
        known = self.random.random() < 0.5 if known is None else known
        return self._job(self.prefix + self._ids(self.tokens - len(self.prefix) // 4) if known else self._ids(self.tokens))

    def prompt(self, job: Job) -> Prompt:
        return Prompt(job, self.chains)

    def decide(self, job: Job, prompt: Prompt) -> list[Charge]:
        pools = self.view.pools(MODEL)
        request = Request.of(job, prompt.hits(self.index, pools), PATIENCE_S)
        return self.charge(self.choose(request, pools))

    def choose(self, request: Request, pools: Collection[Pool]) -> Pair | Local:
        decision = place(pools, request, self.view.now(), self.random)
        assert isinstance(decision, Pair | Local), decision
        return decision

    def charge(self, decision: Pair | Local) -> list[Charge]:
        charges = [self.view.charge(decision.decode, slots=1, blocks=decision.blocks)]
        if isinstance(decision, Pair):
            charges.append(self.view.charge(decision.prefill, prefill_tokens=decision.uncached))
        return charges

    def note(self, prompt: Prompt, charges: list[Charge]) -> None:
        """What the chosen workers will have; with that, hashing what no look-up wanted."""
        blocks = tuple(prompt.chain(KV, 16))
        for charge in charges:
            self.index.expect(charge.process, blocks, self.view.now())

    def answered(self, charges: list[Charge]) -> None:
        """What workers say then, and the router's upkeep."""
        for charge in charges:
            self.view.undo(charge)
            self.view.observe(self._state(charge.process, Role.DECODE if charge.slots else Role.PREFILL))
        self.index.clear_some()
        if self.first_sight:
            self.chains = Chains()

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
            context_length=CONTEXT,
            block_tokens=16,
            kv_total=40_000,
            backlog=self.random.randrange(20_000),
            rates=Rates(prefill_tokens_s=20_000 * self.random.uniform(0.9, 1.1), decode_step_s=0.02),
            host=self.hosts[process],
        )


def measure(setting: Setting, decisions: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each decision, in order of size."""
    seconds = list[float]()
    keep_collections_short()  # as a router does
    for _ in range(decisions):
        job = setting.job()
        started = clock()
        charges = setting.decide(job, prompt := setting.prompt(job))
        seconds.append(clock() - started)
        setting.note(prompt, charges)
        setting.answered(charges)
    return sorted(seconds)


def parts(setting: Setting, decisions: int, clock: Callable[[], float], *, known: bool) -> dict[str, list[float]]:
    """The same by what it is made of, for prompts whose beginning is `known` or for new ones. `noting` comes after the
    decision."""
    seconds: dict[str, list[float]] = defaultdict(list)
    keep_collections_short()  # as a router does
    for _ in range(decisions):
        job, at = setting.job(known), [clock()]

        def lap(times: list[float] = at) -> None:
            times.append(clock())

        pools, prompt = setting.view.pools(MODEL), setting.prompt(job)
        prompt.hits(setting.index, pools)
        lap()
        hits = prompt.hits(setting.index, pools)  # again: what it has to hash is known now
        lap()
        decision = setting.choose(Request.of(job, hits, PATIENCE_S), pools)
        lap()
        charges = setting.charge(decision)
        lap()
        setting.note(prompt, charges)
        lap()
        first, again, *rest = (after - before for before, after in pairwise(at))
        for name, spent in zip(PARTS, (first - again, again, *rest), strict=True):
            seconds[name].append(spent)
        seconds["decision"].append(first + rest[0] + rest[1])
        setting.answered(charges)
    return {name: sorted(spent) for name, spent in seconds.items()}


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(len(ordered) * share)]


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
    parser.add_argument("--decisions", type=whole(1), default=2000)
    parser.add_argument("--cpu", action="store_true", help="CPU time, not time on the wall")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--first-sight", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--workers", type=whole(2), nargs="+", default=WORKERS)
    parser.add_argument("--tokens", type=whole(1, CONTEXT - 1), nargs="+", default=TOKENS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [(workers, USUAL_TOKENS) for workers in options.workers] + [(USUAL_WORKERS, tokens) for tokens in options.tokens]
    clock = time.thread_time if options.cpu else time.perf_counter
    if options.parts:
        _parts(options.decisions, clock, options.first_sight)
        return 0
    results = []
    for workers, tokens in cases:
        spent = measure(Setting(workers, tokens, seed=1, first_sight=options.first_sight), options.decisions, clock)
        results.append({"workers": workers, "tokens": tokens, "p50": quantile(spent, 0.5), "p99": quantile(spent, 0.99)})
        print(f"{workers:5d} workers {tokens:6d} tokens: {_line(spent)}", flush=True)
    if options.memory:
        for case in MEMORY:
            print("prefix index, {} workers, {} have a block, {} blocks alike: ".format(*case), end="")
            print(f"{memory(*case):.0f} MB per million blocks, at most {bound(case[0]):.0f}", flush=True)
    (options.out / "router-decision.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    _plot(results, len(options.workers), options.out / "router-decision.png")
    return 0


def _parts(decisions: int, clock: Callable[[], float], first_sight: bool) -> None:
    for known in (True, False):
        setting = Setting(USUAL_WORKERS, USUAL_TOKENS, seed=1, first_sight=first_sight)
        print(f"{USUAL_WORKERS} workers, {USUAL_TOKENS} tokens, {'three quarters cached' if known else 'nothing cached'}")
        for name, spent in parts(setting, decisions, clock, known=known).items():
            print(f"  {name:<11}{_line(spent)}", flush=True)


def _line(spent: Sequence[float]) -> str:
    return f"p50 {1e6 * quantile(spent, 0.5):6.0f} us  p99 {1e6 * quantile(spent, 0.99):6.0f} us"


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
