"""What the pipeline costs beside NVIDIA Dynamo's, both with engines that take no time; then many edges and many open streams.

    .venv/bin/python -m bench.edge [--dynamo PYTHON] [--rounds 3]
    .venv/bin/python -m bench.edge --streams 2000

Whole pipelines through HTTP on this machine, run alone: real chat template and tokenizer, one token a job a step, one event a
token, a handoff of the prompt's blocks. PYTHON: of an environment with ai-dynamo 1.6.1 (`bench/dynamo.py`), which is measured as
it comes, and with TCP_NODELAY set from outside; without it our rows are printed alone. The servers take turns, round by round;
figures are medians, to be compared inside one run. `front`: edge, router and NATS here, the frontend there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from bench.bodies import write_bodies
from bench.dynamo import build_nodelay, dynamo
from bench.memory import memory_of
from bench.overhead import LONG, SETTINGS, WORDS
from bench.stack import Stack, build_load, load_result, run_load, spent_each, stack, start_load
from services.models.store import ModelStore

FRONT = ("e1", "r1", "nats", "frontend")
SLOW_STEP_S, SLOW_TOKENS, RAMP_S = 0.5, 120, 20.0
"""The last streams are open for long before the first ones end."""
Figures = dict[str, float]


class Server(Protocol):
    """Something to send requests to: Headrace, or an opponent."""

    @property
    def port(self) -> int: ...

    @property
    def model(self) -> str: ...

    def cpu_seconds(self) -> dict[str, float]: ...


class Bodies:
    """Request bodies for one model: of two tokens, and of many."""

    def __init__(self, folder: Path, model: str) -> None:
        self.two, self.long = folder / f"{model}-two.jsonl", folder / f"{model}-long.jsonl"
        write_bodies(self.two, model=model, max_tokens=2, words=WORDS, count=4000)
        write_bodies(self.long, model=model, max_tokens=LONG, words=WORDS, count=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=0, help="only this: so many open at once, what each costs an edge")
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("HEADRACE_HOME", "~/.cache/headrace")).expanduser())
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        load = build_load(Path(scratch))
        if options.streams:
            open_streams(options.home, load, Path(scratch), options.streams)
            return
        beside_dynamo(options.home, options.dynamo, load, Path(scratch), options.rounds)
        several_edges(options.home, load, Path(scratch))


def beside_dynamo(home: Path, python: Path | None, load: Path, scratch: Path, rounds: int) -> None:
    with ExitStack() as started:
        ours = started.enter_context(
            stack(home, "--engine", "scripted", settings={**SETTINGS, "HEADRACE_WORKER__MAX_BATCH": "128"})
        )
        servers: dict[str, Server] = {"Headrace": ours}
        if python is None or not python.exists():
            print("rival not installed")
        else:
            files = ModelStore(home).open(ours.model).folder
            servers["Dynamo, as it comes"] = started.enter_context(dynamo(python, files))
            servers["Dynamo, TCP_NODELAY"] = started.enter_context(dynamo(python, files, preload=build_nodelay(scratch)))
        bodies = {server.model: Bodies(scratch, server.model) for server in servers.values()}
        for server in servers.values():
            run_load(load, server.port, bodies[server.model].two, streams=32, requests=500)  # warm up
        turns: dict[str, list[Figures]] = {name: [] for name in servers}
        for turn in range(rounds):
            names = list(servers)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                turns[name].append(one_turn(servers[name], load, bodies[servers[name].model]))
    rows = list(turns["Headrace"][0])
    print(f"| | {' | '.join(servers)} |\n|---|{'---|' * len(servers)}")
    for row in rows:
        print(f"| {row} | {' | '.join(f'{statistics.median(turn[row] for turn in turns[name]):,.1f}' for name in servers)} |")
    print(flush=True)


def one_turn(server: Server, load: Path, bodies: Bodies) -> Figures:
    single = run_load(load, server.port, bodies.two, streams=1, requests=200)
    before = server.cpu_seconds()
    short = run_load(load, server.port, bodies.two, streams=32, requests=2000)
    between = server.cpu_seconds()
    streamed = run_load(load, server.port, bodies.long, streams=32, requests=160)
    after = server.cpu_seconds()
    many = run_load(load, server.port, bodies.long, streams=128, requests=256)
    request, token = spent_each(before, between, short["n"]), spent_each(between, after, streamed["tokens"])
    return {
        "time to first token, 1 stream, p50, ms": single["ttft_ms"]["p50"],
        "requests/s of two tokens, 32 streams": short["rps"],
        f"tokens/s, 32 streams of {LONG}": streamed["tok_s"],
        f"tokens/s, 128 streams of {LONG}": many["tok_s"],
        "CPU µs a request of two tokens, all": sum(request.values()),
        "front": sum(value for name, value in request.items() if name in FRONT),
        "CPU µs a token, all": sum(token.values()),
        "front, a token": sum(value for name, value in token.items() if name in FRONT),
    }


def several_edges(home: Path, load: Path, scratch: Path) -> None:
    """One generator an edge, 32 streams in all."""
    print("| edges | tokens/s | CPU µs a token: edges | all |\n|---|---|---|---|")
    for edges in (1, 2, 4):
        with stack(home, "--engine", "scripted", edges=edges, settings=SETTINGS) as running:
            bodies = Bodies(scratch, running.model)
            run_load(load, running.port, bodies.two, streams=32, requests=500)
            before = running.cpu_seconds()
            options = ("-c", str(32 // edges), "-n", str(192 // edges))
            results = [load_result(one) for one in [start_load(load, port, bodies.long, *options) for port in running.ports]]
            spent = spent_each(before, running.cpu_seconds(), sum(result["tokens"] for result in results))
            of_edges = sum(value for name, value in spent.items() if name.startswith("e"))
            rate = sum(result["tok_s"] for result in results)
            print(f"| {edges} | {rate:,.0f} | {of_edges:.1f} | {sum(spent.values()):.1f} |", flush=True)
    print(flush=True)


def open_streams(home: Path, load: Path, scratch: Path, streams: int) -> None:
    """Of an engine whose steps take half a second: what one edge needs for each stream, and how evenly tokens come."""
    settings = {
        **SETTINGS,
        "HEADRACE_WORKER__MAX_BATCH": str(streams),
        "HEADRACE_WORKER__KV_BLOCKS": str(4 * streams),
        "HEADRACE_SCRIPTED__DECODE_STEP_S": str(SLOW_STEP_S),
    }
    with stack(home, "--engine", "scripted", settings=settings) as running:
        slow, two = scratch / "slow.jsonl", Bodies(scratch, running.model).two
        write_bodies(slow, model=running.model, max_tokens=SLOW_TOKENS, words=WORDS, count=streams)
        run_load(load, running.port, two, streams=32, requests=64)  # warm up
        idle, before = _own_mb(running), running.cpu_seconds()
        options = ("-c", str(streams), "-n", str(streams), "-r", f"{RAMP_S:.0f}", "-t", "300")
        going = start_load(load, running.port, slow, *options)
        most = idle
        while going.poll() is None:
            most = max(most, _own_mb(running))
            time.sleep(2)
        result, spent = load_result(going), running.cpu_seconds()
    cores = {name: (spent[name] - before[name]) / result["secs"] for name in spent}
    print(
        f"{streams} open streams on one edge, a token each {1e3 * SLOW_STEP_S:.0f} ms, opened in {RAMP_S:.0f} s: "
        f"{result['n'] - result['errors']} whole, {result['errors']} failed\n"
        f"memory of the edge: {idle:.0f} MB idle, {1e3 * (most - idle) / streams:.0f} kB a stream\n"
        f"between tokens: {result['itl_ms']['p50']:.0f} ms; more or less than that: p50 {result['jitter_ms']['p50']:.0f} ms, "
        f"p99 {result['jitter_ms']['p99']:.0f} ms\n"
        f"cores in use: {', '.join(f'{name} {share:.2f}' for name, share in cores.items())}"
    )


def _own_mb(running: Stack) -> float:
    """What its edge has for itself."""
    return memory_of([running.pids["e1"]]).own


if __name__ == "__main__":
    main()
