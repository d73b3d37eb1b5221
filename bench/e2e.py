"""The whole stack, as `make up` starts it, against llama.cpp's server: through HTTP, in one run, turn by turn. Run it alone:

    .venv/bin/python -m bench.e2e --llama-server PATH --weights F16.gguf Q4_1.gguf [--rounds 5]

One prefill and one decode worker, one configuration for all rows. The servers take turns, the order changing from round to
round, and a ratio is the median of the pairs'. The first weights given are the opponent of the targets; each is tuned first
(`rival.py`), and what was tried is printed. Without a server the rows are printed alone. Then: how late the event loops were with
prompts of 8,000 tokens arriving, and what memory everybody took.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import lag
from bench.memory import memory_of
from bench.rival import Configuration, Rival, geometric_mean, rival, tune
from bench.stack import Stack, build_load, stack
from bench.targets import table
from bench.workloads import EIGHT, LONGEST_ARRIVALS, TUNING, Figures, Workloads

LAG_TARGET_MS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--weights", type=Path, nargs="+", default=[], metavar="GGUF")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--untuned", type=int, metavar="THREADS", help="no tuning: flash attention and batches as they come")
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("HEADRACE_HOME", "~/.cache/headrace")).expanduser())
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before", flush=True)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as servers:
        load = build_load(Path(scratch))
        weights = options.weights if options.llama_server and options.llama_server.exists() else []
        best = {path: configure(options.llama_server, path, Path(scratch), load, options.untuned) for path in weights}
        ours = servers.enter_context(stack(options.home))
        rivals = {path.stem: servers.enter_context(rival(options.llama_server, path, choice)) for path, choice in best.items()}
        print("idle:", *memories(ours, rivals), sep="\n  ")
        work = Workloads(Path(scratch), load, ours.model, options.rounds + 1)
        turns = take_turns(work, ours, rivals, options.rounds)
        print()
        print(table(turns.pop("Headrace"), {f"llama.cpp {name}": figures for name, figures in turns.items()}))
        print()
        try:
            print_lags(ours, work, options.rounds)
        except RuntimeError as error:  # a slow or busy machine refuses prompts that it cannot begin in time
            print(f"event loops not measured: {error}")
        print("after the load:", *memories(ours, rivals), sep="\n  ")


def configure(server: Path, weights: Path, scratch: Path, load: Path, untuned: int | None) -> Configuration:
    """The opponent's best, tried on a few rows; not tried with `untuned` threads."""
    if untuned:
        return Configuration(untuned, "on", (2048, 512))
    folder = scratch / weights.stem
    folder.mkdir()
    work = Workloads(folder, load, "any", 1)

    def score(running: Rival) -> float:
        return geometric_mean([work.tokens_s(running.port, row, 0) for row in TUNING])

    print(f"tuning {weights.name}: geometric mean of tokens/s at 1, 8, and 8 streams with long prompts", flush=True)
    return tune(server, weights, score)


def take_turns(work: Workloads, ours: Stack, rivals: dict[str, Rival], rounds: int) -> dict[str, list[Figures]]:
    """Every row of every server, `rounds` times after a turn that warms up; in each round in another order."""
    ports = {"Headrace": ours.port, **{name: running.port for name, running in rivals.items()}}
    turns: dict[str, list[Figures]] = {name: [] for name in ports}
    names = list(ports)
    for port in ports.values():
        work.tokens_s(port, EIGHT, rounds)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            turns[name].append(work.one_turn(ports[name], turn))
            figures = ", ".join(f"{row} {value:.1f}" for row, value in turns[name][-1].items())
            print(f"round {turn + 1} {name}: {figures}", flush=True)
    return turns


def print_lags(ours: Stack, work: Workloads, turn: int) -> None:
    """Of every process, with eight streams running and one prompt of 8,000 tokens after the other."""
    before = lag.read(ours)
    running, arriving = work.beside(ours.port, LONGEST_ARRIVALS, turn)
    after = lag.read(ours)
    tokens = arriving["prompt_tokens"] // arriving["n"]
    print(
        f"{arriving['n']} prompts of {tokens} tokens, one after the other in {arriving['secs']:.0f} s; beside them "
        f"inter-token p99 {running['itl_ms']['p99']:.0f} ms, {running['tok_s']:.0f} tokens/s\n\n"
        f"| event loop late, at most, ms | p50 | p99 (target < {LAG_TARGET_MS:.0f}) | max | computing | waiting for a core |\n"
        "|---|---|---|---|---|---|"
    )
    for process, late in lag.lags(before, after).items():
        times = f"{late.p50:g} | {late.p99:g} | {late.worst:g}"
        print(f"| {process.split('-')[0]} | {times} | {late.computing:.1%} | {late.waiting:.1%} |")


def memories(ours: Stack, rivals: dict[str, Rival]) -> list[str]:
    lines = [f"Headrace {memory_of(ours.pids.values())}"]
    return lines + [f"llama.cpp {name} {memory_of([running.pid])}" for name, running in rivals.items()]


if __name__ == "__main__":
    main()
