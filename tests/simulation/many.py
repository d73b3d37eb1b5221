"""Many seeds on several cores. A seed's outcome does not depend on who runs it, or beside what."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.simulate import Failed, simulate

CHUNK = 25


@dataclass(slots=True)
class Tally:
    """What some seeds came to. `failures` are sentences with a command that replays them."""

    failures: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.failures += other.failures
        self.outcomes += other.outcomes
        self.seconds += other.seconds


class Pool:
    """Worker processes that simulate; close it."""

    def __init__(self, jobs: int | None = None) -> None:
        self._pool = ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=get_context("spawn"))

    def submit(self, seeds: range, kinds: tuple[str, ...] = ()) -> Future[Tally]:
        return self._pool.submit(tally, seeds, kinds)

    def run(self, seeds: range, kinds: tuple[str, ...] = ()) -> Iterator[Tally]:
        """A tally a chunk, in order."""
        futures = [self.submit(seeds[at : at + CHUNK], kinds) for at in range(0, len(seeds), CHUNK)]
        for future in futures:
            yield future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def tally(seeds: range, kinds: tuple[str, ...]) -> Tally:
    """In this process."""
    total = Tally()
    for seed in seeds:
        try:
            result = simulate(seed, kinds=kinds)
        except Failed as failed:
            total.failures.append(str(failed))
        else:
            total.outcomes += result.outcomes
            total.seconds += result.seconds
    return total
