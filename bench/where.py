"""Where the time of each row of `bench.e2e` goes: the whole stack alone, row by row. Run it alone:

    .venv/bin/python -m bench.where [--rounds 3]

For each row: the steps of each engine, what one took (its wait for cores included), how much of the client's time the engine was
in steps, and the cores that each process used. What is left beside decode's steps is the time between them, first tokens and
handoffs. Hold a step against the kernel's own of as many rows (`bench.engine --profile`): the difference surrounds the kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.admin import metrics
from bench.stack import Stack, build_load, stack
from bench.workloads import EIGHT, EIGHT_LONG, FIRST, ONE, SIXTEEN, Closed, Workloads

_STEPS = re.compile(rb"headrace_engine_step_seconds_(sum|count)(?:\{[^}]*\})? ([0-9.e+-]+)")


ENGINES = ("p1", "d1")
PROCESSES = ("p1", "d1", "e1", "r1", "nats")


@dataclass(frozen=True)
class Sample:
    """So far: CPU seconds by process, and by engine the seconds in steps and their number."""

    cpu: dict[str, float]
    steps: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Spent:
    """Of one run, while the client waited."""

    rate: float
    share: dict[str, float]
    """Of the time, by engine: in steps."""
    steps: dict[str, float]
    step_ms: dict[str, float]
    cores: dict[str, float]
    """By process: CPU seconds a second."""


def sample(running: Stack) -> Sample:
    steps = {}
    for process, said in metrics(running).items():
        found = {kind.decode(): float(value) for kind, value in _STEPS.findall(said)}
        steps[process.split("-")[0]] = (found.get("sum", 0.0), found.get("count", 0.0))
    return Sample(running.cpu_seconds(), steps)


def measure(running: Stack, work: Workloads, row: Closed, turn: int) -> Spent:
    before = sample(running)
    began = time.monotonic()
    rate = work.tokens_s(running.port, row, turn)
    wall = time.monotonic() - began
    after = sample(running)
    seconds = {name: after.steps[name][0] - before.steps[name][0] for name in ENGINES}
    steps = {name: after.steps[name][1] - before.steps[name][1] for name in ENGINES}
    return Spent(
        rate,
        {name: seconds[name] / wall for name in ENGINES},
        steps,
        {name: 1e3 * seconds[name] / max(1.0, steps[name]) for name in ENGINES},
        {name: (after.cpu[name] - before.cpu[name]) / wall for name in after.cpu},
    )


def line(row: Closed, turns: list[Spent]) -> str:
    """Medians of the turns."""

    def of(value: Callable[[Spent], float]) -> float:
        return statistics.median(value(turn) for turn in turns)

    cells = [row.name, f"{of(lambda turn: turn.rate):.1f}"]
    for name in ENGINES:
        cells += [
            f"{of(lambda turn, name=name: turn.steps[name]):.0f}",  # type: ignore[misc]
            f"{of(lambda turn, name=name: turn.step_ms[name]):.1f}",  # type: ignore[misc]
            f"{of(lambda turn, name=name: turn.share[name]):.2f}",  # type: ignore[misc]
        ]
    cells += [f"{of(lambda turn, name=name: turn.cores[name]):.2f}" for name in PROCESSES]  # type: ignore[misc]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("HEADRACE_HOME", "~/.cache/headrace")).expanduser())
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before", flush=True)
    with tempfile.TemporaryDirectory() as scratch, stack(options.home) as running:
        work = Workloads(Path(scratch), build_load(Path(scratch)), running.model, options.rounds + 1)
        work.tokens_s(running.port, EIGHT, options.rounds)
        heads = ["row", "tokens/s"]
        for name in ENGINES:
            heads += [f"{name}: steps", "ms each", "of the time"]
        heads += [f"cores: {name}" for name in PROCESSES]
        print(f"| {' | '.join(heads)} |\n|---|{'---|' * (len(heads) - 1)}")
        for row in (ONE, EIGHT, SIXTEEN, FIRST, EIGHT_LONG):
            print(line(row, [measure(running, work, row, turn) for turn in range(options.rounds)]), flush=True)


if __name__ == "__main__":
    main()
