"""llama.cpp's server as an opponent: started in one configuration, and its best configuration found by trying.

The tuning changes one thing at a time: threads, then flash attention, then batch size. The caller's score should span the rows of
its bench, so that none is bought with another.
"""

from __future__ import annotations

import math
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli.up.ports import free_port
from services.engine.host import available_cores

SLOTS = 16
SLOT_TOKENS = 2048
START_S = 120


@dataclass(frozen=True)
class Configuration:
    """`batch` (logical, physical) tokens; flash attention `on` or `off`."""

    threads: int
    flash: str
    batch: tuple[int, int]

    def __str__(self) -> str:
        return f"-t {self.threads} -fa {self.flash} -b {self.batch[0]} -ub {self.batch[1]}"

    @property
    def arguments(self) -> list[str]:
        return [*str(self).split(), "-tb", str(self.threads), "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS)]


@dataclass(frozen=True)
class Rival:
    port: int
    pid: int


@contextmanager
def rival(server: Path, weights: Path, configuration: Configuration) -> Iterator[Rival]:
    """`llama-server` until the block ends. Raises RuntimeError when it does not start."""
    port = free_port()
    command = [str(server), "-m", str(weights), *configuration.arguments, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_healthy(port, process)
        yield Rival(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tune(server: Path, weights: Path, score: Callable[[Rival], float]) -> Configuration:
    """The best configuration found; each one tried is printed with its score."""
    scores: dict[Configuration, float] = {}

    def better(*candidates: Configuration) -> Configuration:
        for candidate in candidates:
            if candidate not in scores:
                with rival(server, weights, candidate) as running:
                    scores[candidate] = score(running)
                print(f"  {weights.name} {candidate}: {scores[candidate]:.0f}", flush=True)
        return max(candidates, key=scores.__getitem__)

    cores = len(available_cores())
    best = better(*(Configuration(threads, "on", (2048, 512)) for threads in sorted({cores, max(1, cores // 2)})))
    best = better(best, replace(best, flash="off"))
    return better(best, replace(best, batch=(512, 512)), replace(best, batch=(2048, 2048)))


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _wait_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server was not ready within {START_S} s")
