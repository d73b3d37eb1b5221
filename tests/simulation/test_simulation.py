"""The control plane under faults: 150 seeds, 500 with the slow test, and those that found something before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from tests.simulation.many import CHUNK, Pool, Tally
from tests.simulation.pinned import PINNED
from tests.simulation.simulate import Failed, simulate

SEEDS = 150
ALL_SEEDS = 500
SHARD = 25
Shards = dict[int, Future[Tally]]


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    """All of them run from the start, on every core; each test waits for its own."""
    pool = Pool()
    yield {first: pool.submit(range(first, first + SHARD)) for first in range(0, SEEDS, SHARD)}
    pool.close()


@pytest.mark.parametrize("first", range(0, SEEDS, SHARD))
def test_every_invariant_holds_in_each_seed(first: int, shards: Shards) -> None:
    tally = shards[first].result(timeout=110)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["finished"] > SHARD  # the faults leave something to look at


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_more() -> None:
    with closing(Pool()) as pool:
        for tally in pool.run(range(SEEDS, ALL_SEEDS)):
            assert not tally.failures, "\n".join(tally.failures)
            assert tally.outcomes["finished"] > CHUNK


@pytest.mark.parametrize(("seed", "kinds"), PINNED, ids=[str(seed) for seed, _ in PINNED])
def test_what_was_found_stays_found(seed: int, kinds: tuple[str, ...]) -> None:
    simulate(seed, kinds=kinds)


def test_the_same_seed_is_the_same_story() -> None:
    """Every message, its bytes and its time; whatever ran before, and in whatever order sets are."""
    here = [simulate(seed).trace for seed in (3, 4, 5, 3)]
    assert here[0] == here[3]
    assert len(set(here)) == 3
    script = "from tests.simulation.simulate import simulate\nprint(*(simulate(seed).trace for seed in (3, 4, 5)))"
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60)
        assert [int(trace) for trace in said.stdout.split()] == here[:3]


def test_a_failure_says_how_to_see_it_again() -> None:
    assert "python -m tests.simulation --first 7 --seeds 1 --log" in str(Failed(7, "something", []))
