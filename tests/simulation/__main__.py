"""python -m tests.simulation [--first N] [--seeds N] [--kinds kill,pause,…] [--log]: many seeds on every core, or one told."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.many import Pool, Tally
from tests.simulation.simulate import Failed, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--kinds", default="", help="only these faults, separated by commas (storm: bad weather; none: nothing)")
    parser.add_argument("--jobs", type=int, help="processes; by default one a core")
    parser.add_argument("--log", action="store_true", help="say every message, one seed after another")
    chosen = parser.parse_args()
    kinds = tuple(kind for kind in chosen.kinds.split(",") if kind)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    return _in_words(seeds, kinds) if chosen.log else _many(seeds, kinds, chosen.jobs)


def _in_words(seeds: range, kinds: tuple[str, ...]) -> int:
    for seed in seeds:
        try:
            print(simulate(seed, kinds=kinds, log=True))
        except Failed as failed:
            print("\n".join(failed.log))
            print(failed)
            return 1
    return 0


def _many(seeds: range, kinds: tuple[str, ...], jobs: int | None) -> int:
    began, total, pool = time.monotonic(), Tally(), Pool(jobs)
    try:
        for tally in pool.run(seeds, kinds):
            total.add(tally)
            if tally.failures:
                print("\n".join(tally.failures), flush=True)
    finally:
        pool.close()
    spent = time.monotonic() - began
    print(f"{len(seeds)} seeds, {total.seconds:.0f} virtual seconds in {spent:.0f} s: {len(total.failures)} failed")
    print(", ".join(f"{outcome} {count}" for outcome, count in total.outcomes.most_common()))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
