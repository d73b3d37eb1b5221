"""What the core arbiter is worth: a decode engine and a prefill engine, alone and side by side, with it and without it.

    python -m bench.cores [--model NAME] [--rounds 4] [--seconds 4]

Two processes with the C kernel on the cores of this machine. Decode: steps of 8 rows at a context of 256, one after the other.
Prefill: steps of 128 prompt tokens. "idle": the other engine has nothing to do. "none": no arbiter, each engine takes every core
for every step, and the system shares them. The cases take turns, round by round, because other work on the machine shows in all
of them; its load is printed first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.kernel import decode_step, kernel, prompt_step
from services.engine.cores import CoreArbiter
from services.engine.host import available_cores
from services.engine.scheduler import Chunk, Step
from services.engine.torch_engine.config import load_config
from services.models.store import ModelStore
from services.settings.settings import Settings

ROWS = 8
CHUNK = 128
ROLES = ("decode", "prefill")
CASES = {
    "decode, prefill idle": (ROLES[:1], True),
    "prefill, decode idle": (ROLES[1:], True),
    "both, arbiter": (ROLES, True),
    "both, none": (ROLES, False),
}
Steps = dict[str, list[float]]
"""Of one round: `whole` and `computing`, seconds of each step; `threads` of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--engine", nargs=2, metavar=("ROLE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        role, folder = options.engine
        asyncio.run(engine(options.model, role, Path(folder), options.seconds))
        return
    print(f"{len(available_cores())} cores, load {os.getloadavg()[0]:.1f}")
    measured: dict[tuple[str, str], list[Steps]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(options.rounds):
            for name, (roles, shared) in CASES.items():
                for role, steps in side_by_side(options.model, options.seconds, roles, Path(scratch), shared=shared).items():
                    measured.setdefault((name, role), []).append(steps)
    for (name, role), rounds in measured.items():
        print(f"{name:21} {role:7} {told(role, rounds)}")


def side_by_side(model: str, seconds: float, roles: tuple[str, ...], scratch: Path, *, shared: bool) -> dict[str, Steps]:
    """What each engine says of its steps. Without a folder that they share they know nothing of each other."""
    children = []
    for role in roles:
        folder = scratch / ("shared" if shared else role)
        folder.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "bench.cores", "--model", model, "--seconds", str(seconds), "--engine", role, str(folder)]
        children.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for child in children:
            while (line := child.stdout.readline()) != "ready\n":  # type: ignore[union-attr]
                if not line:
                    raise SystemExit("an engine did not start")
        for child in children:
            child.stdin.write("go\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
        said = [child.communicate(timeout=seconds + 60)[0] for child in children]
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                child.kill()
            child.wait()
    return {role: json.loads(text) for role, text in zip(roles, said, strict=True)}


def told(role: str, rounds: list[Steps]) -> str:
    whole, computing, threads = (sorted_of(rounds, key) for key in ("whole", "computing", "threads"))
    waiting = statistics.mean(whole) - statistics.mean(computing)
    rates = [len(steps["whole"]) / sum(steps["whole"]) * (ROWS if role == "decode" else CHUNK) for steps in rounds]
    return (
        f"step p50 {1e3 * statistics.median(whole):6.1f} ms  p99 {1e3 * whole[int(0.99 * (len(whole) - 1))]:6.1f} ms  "
        f"of it waiting {1e3 * waiting:5.2f} ms  threads {statistics.mean(threads):4.2f}  "
        f"{statistics.median(rates):5.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})"
    )


def sorted_of(rounds: list[Steps], key: str) -> list[float]:
    return sorted(value for steps in rounds for value in steps[key])


async def engine(model: str, role: str, folder: Path, seconds: float) -> None:
    """Steps, one after the other, for `seconds`; what they took as JSON."""
    settings = Settings()
    files = ModelStore(settings.home_dir).open(model)
    cores = CoreArbiter(folder, available_cores())
    compute = kernel(files, load_config(files.config), settings, cores.most)
    step = decode_step(ROWS) if role == "decode" else prompt_chunk()
    compute(step, 1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    loop = asyncio.get_running_loop()
    whole, computing, threads = [], [], []
    began = time.perf_counter()
    while (started := time.perf_counter()) < began + seconds:
        async with cores.step(decode=role == "decode") as count:
            taken = time.perf_counter()
            await loop.run_in_executor(None, compute, step, count)
            computing.append(time.perf_counter() - taken)
        whole.append(time.perf_counter() - started)
        threads.append(count)
    print(json.dumps({"whole": whole, "computing": computing, "threads": threads}))


def prompt_chunk() -> Step:
    (chunk,) = prompt_step().chunks
    return Step((Chunk(chunk.sequence, 0, CHUNK, samples=True),))


if __name__ == "__main__":
    main()
