"""Placement policies on a real arrival trace, on a virtual clock: `python -m bench.routing --trace PATH`.

Headrace's own code (`services.router`) beside round robin, random, least loaded, power of two, and the published rules of Dynamo
and SGLang. The clock is virtual and everything is drawn by seed: the figures are the same on any machine, however busy.

How the cluster is simulated, and what is left out of it, stands at the modules of `bench/routing_world`; what the figures say, in
docs/routing.md. Formats: Mooncake (JSON lines) and Azure (CSV), told apart by their content.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from bench.flags import above_zero, from_zero, whole
from bench.routing_world import overload, stale
from bench.routing_world.compare import POLICIES, Verdict, compare, full, saturation, sweep, verdict
from bench.routing_world.measure import Result
from bench.routing_world.plot import plot
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import Row, read

MAY_BE_ZERO = ("prefill_cache", "step_per_sequence", "shorter_share")
LOADS = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line a run. 1 when a target of `--check` is missed."""
    options = _parse(arguments)
    reading = options.trace
    try:
        rows = read(options.trace, seed=options.seed, limit=options.rows)
        reading = options.out
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"{reading}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    world = replace(World(), **{field.name: getattr(options, field.name) for field in fields(World)})
    limits = replace(Limits(), **{field.name: getattr(options, f"limit_{field.name}") for field in fields(Limits)})
    worlds = [("default", world), *(sweep(world) if options.sweep else ())]
    if options.overload:
        peak = _peak(rows, world, limits, options)
        return int(not _overload(rows, world, limits, peak, options.seed) and options.check)
    verdicts = [_world(name, changed, rows, limits, options) for name, changed in worlds]
    return int(options.check and not all(found is None or found.holds() for found in verdicts))


def _world(name: str, world: World, rows: Sequence[Row], limits: Limits, options: argparse.Namespace) -> Verdict | None:
    peak = _peak(rows, world, limits, options)
    print(f"\n{options.trace.name}, {name} world: {len(rows)} requests; load 1.0 = {peak:.2f} x as fast as recorded", flush=True)
    print(_HEAD, flush=True)
    results = []
    for result in compare(options.policies, rows, world, limits, options.loads, peak, options.seed):
        print(_line(result), flush=True)
        results.append(result)
    stem = f"routing-{options.trace.stem}-{name.replace(' ', '-')}"
    content = {"world": asdict(world), "limits": asdict(limits), "peak": peak, "results": [asdict(result) for result in results]}
    (options.out / f"{stem}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if not options.no_plots:
        plot(results, options.out / f"{stem}.png", f"{options.trace.name}, {name} world")
    if not {"ours", "round robin"} <= set(options.policies):
        return None
    found = verdict(results)
    against = f"against round robin from load 0.9: {found.gain:+.1%} at least" if found.gain == found.gain else "no load from 0.9"
    print(f"ours against the best: {found.worst:+.1%} at its worst (load {found.worst_load:g}); {against}", flush=True)
    return found


def _peak(rows: Sequence[Row], world: World, limits: Limits, options: argparse.Namespace) -> float:
    """How fast the trace is played at load 1.0."""
    found: float | None = options.peak or saturation(rows, world, limits, options.seed)
    if found is None:
        print("round robin's goodput has no peak: load 1.0 is where the trace would take all of the busier phase", flush=True)
    return found or full(rows, world)


def _overload(rows: Sequence[Row], world: World, limits: Limits, peak: float, seed: int) -> bool:
    """Prints one line a load and tier, then the targets. True when all are met."""
    results = []
    for load in overload.LOADS:
        results.append(result := overload.overload(rows, world, limits, peak, load, seed))
        print(f"load {load:4.2f}: goodput {result.goodput:.2f}/s, asked again when told: {result.truth:.2f}", flush=True)
        for tier in result.tiers:
            print(
                f"  {tier.tier.value:<11}{tier.jobs:6} jobs{tier.good:7.1%} good{tier.refused:7.1%} refused, "
                f"TTFT p50 {tier.ttft_p50:.2f} s, p99 {tier.ttft_p99:.2f} s",
                flush=True,
            )
    late = stale.caps(rows, world, limits, 2 * peak, seed)
    targets = [
        *overload.targets(results, world),
        (
            f"two routers at 2.0, one 5 s late, {late.refused} of {late.asked} of its tries refused: at most {late.sequences} "
            f"sequences of {late.batch} at a decode worker, {late.over_a_step} times more than a step queued at a prefill worker",
            late.sequences <= late.batch and not late.over_a_step,
        ),
    ]
    for text, met in targets:
        print(f"{'met   ' if met else 'MISSED'} {text}")
    return all(met for _, met in targets)


_HEAD = "{:>5} {:<13}{:>10}{:>7}{:>8}{:>9}{:>8}{:>9}{:>8}{:>7}{:>7}".format(
    "load", "policy", "goodput/s", "good", "refused", "TTFT p50", "p99", "ITL p50", "p99", "hits", "fair"
)


def _line(result: Result) -> str:
    return (
        f"{result.load:5.2f} {result.policy:<13}{result.goodput:10.2f}{result.good:7.1%}{result.refused:8.1%}"
        f"{result.ttft_p50:8.2f}s{result.ttft_p99:7.2f}s{1000 * result.itl_p50:7.0f}ms{1000 * result.itl_p99:6.0f}ms"
        f"{result.hit_rate:7.1%}{result.fairness:7.3f}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description="Compares placement policies on a trace.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--loads", type=above_zero, nargs="+", default=LOADS, help="1.0 = where round robin's goodput peaks")
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES), default=tuple(POLICIES))
    parser.add_argument("--sweep", action="store_true", help="also with each rate and capacity halved and doubled")
    parser.add_argument("--overload", action="store_true", help="ours only, with tiers, up to twice the load that saturates")
    parser.add_argument("--peak", type=above_zero, help="speed of the time axis at load 1.0, instead of looking for it")
    parser.add_argument("--rows", type=whole(1), help="only the first so many requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit 1 when ours is more than 1 %% below the best at any load")
    world = parser.add_argument_group("the world")
    for field in fields(World):
        world.add_argument(f"--{field.name.replace('_', '-')}", type=_kind(field.name, field.default), default=field.default)
    limits = parser.add_argument_group("what a good request keeps to")
    for field in fields(Limits):
        name = f"--limit-{field.name.replace('_', '-')}"
        limits.add_argument(name, dest=f"limit_{field.name}", type=above_zero, default=field.default)
    return parser.parse_args(arguments)


def _kind(name: str, default: object) -> Callable[[str], float]:
    may_be_zero = name in MAY_BE_ZERO
    if isinstance(default, int):
        return whole(0 if may_be_zero else 1)
    return from_zero if may_be_zero else above_zero


if __name__ == "__main__":
    sys.exit(main())
