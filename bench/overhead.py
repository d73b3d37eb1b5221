"""What Headrace itself costs: the whole pipeline through HTTP with a scripted engine that takes no time.

Real template and tokenizer, one real KV block handed over a job, one token a job a step. Run it alone:

    .venv/bin/python -m bench.overhead [--rounds 3]

Prints, as medians over the rounds: time to the first and from the first to the second token at 1 stream, requests/s of two tokens
at 32 streams, tokens/s at 32 streams of 256, and CPU microseconds per request and per token of each process and of all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.bodies import write_bodies
from bench.stack import Stack, build_load, run_load, spent_each, stack

SETTINGS = {
    "HEADRACE_SCRIPTED__BLOCK_TOKENS": "64",  # the prompt fills one block
    "HEADRACE_WORKER__KV_BLOCKS": "8192",
    "HEADRACE_WORKER__MAX_BATCH": "64",
    "HEADRACE_WORKER__STEP_TOKENS": "8192",
}
WORDS = 8
LONG = 256


@dataclass
class Round:
    """One round's figures: ms, per second, and CPU µs by process."""

    ttft_ms: float
    second_ms: float
    requests_s: float
    tokens_s: float
    cpu_per_request: dict[str, float] = field(default_factory=dict)
    cpu_per_token: dict[str, float] = field(default_factory=dict)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--home", type=Path, default=Path(os.environ.get("HEADRACE_HOME", "~/.cache/headrace")).expanduser())
    options.add_argument("--json", action="store_true")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch, stack(arguments.home, "--engine", "scripted", settings=SETTINGS) as running:
        rounds = measure(running, Path(scratch), arguments.rounds)
    report(rounds, as_json=arguments.json)


def measure(running: Stack, scratch: Path, rounds: int) -> list[Round]:
    load = build_load(scratch)
    two, long = scratch / "two.jsonl", scratch / "long.jsonl"
    write_bodies(two, model=running.model, max_tokens=2, words=WORDS, count=4000)
    write_bodies(long, model=running.model, max_tokens=LONG, words=WORDS, count=512)
    run_load(load, running.port, two, streams=32, requests=500)  # warm up
    return [one_round(running, load, two, long) for _ in range(rounds)]


def one_round(running: Stack, load: Path, two: Path, long: Path) -> Round:
    single = run_load(load, running.port, two, streams=1, requests=300)
    before = running.cpu_seconds()
    short = run_load(load, running.port, two, streams=32, requests=3000)
    between = running.cpu_seconds()
    streamed = run_load(load, running.port, long, streams=32, requests=256)
    after = running.cpu_seconds()
    return Round(
        ttft_ms=single["ttft_ms"]["p50"],
        second_ms=single["itl_ms"]["p50"],
        requests_s=short["rps"],
        tokens_s=streamed["tok_s"],
        cpu_per_request=with_all(spent_each(before, between, short["n"])),
        cpu_per_token=with_all(spent_each(between, after, streamed["tokens"])),
    )


def with_all(each: dict[str, float]) -> dict[str, float]:
    return {**each, "all": sum(each.values())}


def report(rounds: list[Round], *, as_json: bool) -> None:
    def median(read: Callable[[Round], float]) -> float:
        return statistics.median(read(one) for one in rounds)

    processes = list(rounds[0].cpu_per_request)

    def by_process(read: Callable[[Round], dict[str, float]], digits: int) -> dict[str, float]:
        return {process: round(statistics.median(read(one)[process] for one in rounds), digits) for process in processes}

    figures: dict[str, float | dict[str, float]] = {
        "time to first token, 1 stream, p50, ms": median(lambda r: r.ttft_ms),
        "first to second token, 1 stream, p50, ms": median(lambda r: r.second_ms),
        "requests/s of two tokens, 32 streams": median(lambda r: r.requests_s),
        f"tokens/s, 32 streams of {LONG}": median(lambda r: r.tokens_s),
        "CPU µs per request of two tokens": by_process(lambda r: r.cpu_per_request, 1),
        f"CPU µs per token ({LONG} a request)": by_process(lambda r: r.cpu_per_token, 2),
    }
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    for name, value in figures.items():
        print(f"{name}: {value if isinstance(value, dict) else round(value, 2)}")


if __name__ == "__main__":
    main()
