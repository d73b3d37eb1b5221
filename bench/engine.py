"""The torch engine alone: the step loop and the kernel (or pure torch) in this process, without bus, HTTP or a second worker.

    .venv/bin/python -m bench.engine [--llama-bench PATH --weights F16.gguf Q4_1.gguf] [--rounds 5] [--profile]

Decode tokens/s at 1, 8, 16 and 32 rows (contexts of 16 to 112 tokens), the time of a 456-token prompt and of eight at once. With
llama-bench beside it, turn by turn, what that measures too: one row and one prompt, each at its best of threads and flash
attention; a ratio is the median of the pairs'. `--profile` then says where each millisecond of a step goes (`step_times.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from random import Random

import uvloop

from bench import step_times
from schemas.job import Choice, Sampling
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.host import available_cores
from services.engine.protocol import RunSpec, StepReport
from services.engine.torch_engine.build import build
from services.engine.torch_engine.config import load_config
from services.models.store import ModelFiles, ModelStore
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings

ROWS = (1, 8, 16, 32)
SHORT, LONG, GENERATED = 16, 456, 96
PROMPT, PROMPTS = f"prompt of {LONG}, ms", f"8 prompts of {LONG}, tokens/s"
BLOCKS = 2000
Figures = dict[str, float]


class Engine:
    """Runs on one engine, and when their tokens came. No prompt is computed twice."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._random = Random(3)
        self._runs = 0
        self._times: dict[int, list[float]] = {}
        self._ended = 0
        self._changed = asyncio.Event()
        engine.start(self._on_step)

    async def close(self) -> None:
        await self._engine.stop()

    async def measure(self) -> Figures:
        figures = {f"decode {rows} rows, tokens/s": await self._decode(rows) for rows in ROWS}
        figures[PROMPT] = 1e3 * await self._prefill(1)
        figures[PROMPTS] = 8 * LONG / await self._prefill(8)
        return figures

    async def _decode(self, rows: int) -> float:
        """Tokens/s while all rows decode: from the last one's second token to the first one's last."""
        times = await self._run(rows, SHORT, GENERATED)
        began, ended = max(each[1] for each in times), min(each[-1] for each in times)
        return sum(began < at <= ended for each in times for at in each) / (ended - began)

    async def _prefill(self, prompts: int) -> float:
        """Seconds until each of them has its first token."""
        started = time.perf_counter()
        return max(each[0] for each in await self._run(prompts, LONG, 1)) - started

    async def _run(self, count: int, prompt: int, tokens: int) -> list[list[float]]:
        """When the tokens of each of `count` runs came."""
        first, self._ended = self._runs, 0
        for _ in range(count):
            ids = tuple(self._random.randrange(100, 10_000) for _ in range(prompt))
            self._times[self._runs] = []
            sampling = Sampling(seed=1, temperature=0.0, max_tokens=tokens, ignore_eos=True)
            self._engine.prefill(RunSpec(self._runs, ids, (Choice(index=0),), sampling), then_decode=True)
            self._runs += 1
        async with asyncio.timeout(120):
            while self._ended < count:
                self._changed.clear()
                await self._changed.wait()
        return [self._times[run] for run in range(first, self._runs)]

    def _on_step(self, report: StepReport) -> None:
        now = time.perf_counter()
        for output in report.tokens:
            self._times[output.run].append(now)
        self._ended += len(report.ended)
        self._changed.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--weights", type=Path, nargs="+", default=[], metavar="GGUF")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    settings = Settings()
    files = ModelStore(settings.home_dir).open(options.model)
    weights = options.weights if options.llama_bench and options.llama_bench.exists() else []
    print(f"{len(available_cores())} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    ours, theirs = uvloop.run(take_turns(files, settings, options.llama_bench, weights, options.rounds))
    print(table(ours, theirs))
    if options.profile:
        for threads in sorted({1, len(available_cores())}):
            print()
            step_times.report(files, load_config(files.config), settings, threads, 4 * options.rounds)


async def take_turns(
    files: ModelFiles, settings: Settings, llama_bench: Path, weights: list[Path], rounds: int
) -> tuple[list[Figures], dict[str, list[Figures]]]:
    worker = WorkerSettings(kv_blocks=BLOCKS)
    engine = Engine(build(files, worker, SystemClock(), kernels=settings.home_dir / "kernels"))
    ours: list[Figures] = []
    theirs: dict[str, list[Figures]] = {path.stem: [] for path in weights}
    await engine.measure()  # warms up
    for _ in range(rounds):
        ours.append(await engine.measure())
        for path in weights:
            theirs[path.stem].append(await asyncio.to_thread(opponent, llama_bench, path))
    await engine.close()
    return ours, theirs


def opponent(llama_bench: Path, weights: Path) -> Figures:
    """What llama-bench reaches at its best; its first run of each kind is its own warm-up."""
    cores = len(available_cores())
    threads = ",".join(map(str, sorted({max(1, cores // 2), cores})))
    command = [str(llama_bench), "-m", str(weights), "-p", str(LONG), "-n", str(GENERATED)]
    done = subprocess.run(
        [*command, "-t", threads, "-fa", "0,1", "-r", "1", "-o", "json"], check=True, capture_output=True, text=True, timeout=300
    )
    rates = {"n_gen": 0.0, "n_prompt": 0.0}
    for run in json.loads(done.stdout):
        kind = "n_gen" if run["n_gen"] else "n_prompt"
        rates[kind] = max(rates[kind], run["avg_ts"])
    return {"decode 1 rows, tokens/s": rates["n_gen"], PROMPT: 1e3 * LONG / rates["n_prompt"]}


def table(ours: list[Figures], theirs: dict[str, list[Figures]]) -> str:
    """Markdown: medians; ratios are tokens/s over tokens/s, or ms over ms."""
    lines = [f"| engine alone | Headrace |{''.join(f' llama.cpp {name} | ratio |' for name in theirs)}"]
    lines.append("|---|---|" + "---|---|" * len(theirs))
    for name in ours[0]:
        cells = [name, f"{statistics.median(turn[name] for turn in ours):.0f}"]
        for turns in theirs.values():
            if name in turns[0]:
                ratio = statistics.median(mine[name] / other[name] for mine, other in zip(ours, turns, strict=True))
                cells += [f"{statistics.median(turn[name] for turn in turns):.0f}", f"{ratio:.2f}x"]
            else:
                cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines if theirs else [*lines, "", "rival not built"])


if __name__ == "__main__":
    main()
