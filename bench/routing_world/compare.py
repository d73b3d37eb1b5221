"""Runs every policy at every load, where load 1.0 is the one at which round robin's goodput peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.routing_world.cluster import Cluster, Policy
from bench.routing_world.measure import Result, measure
from bench.routing_world.ours import Ours
from bench.routing_world.rivals import Dynamo, LeastLoaded, PowerOfTwo, RoundRobin, SGLang, Uniform
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import Row

POLICIES: dict[str, Callable[[int], Policy]] = {
    "ours": Ours,
    "round robin": RoundRobin,
    "random": Uniform,
    "least loaded": LeastLoaded,
    "power of two": PowerOfTwo,
    "dynamo": Dynamo,
    "sglang": SGLang,
}
LIGHT, GROWTH, MOST = 0.4, 1.15, 40
"""The search's first load, as a share of a full one; between two loads; at most so many. Its last steps are a quarter of that."""
FALLEN = 0.9
"""The search ends when goodput fell below this share of the best seen: what comes behind a cliff is no peak."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worst`: ours over the best policy, -1, at its lowest over all loads. `gain`: over round robin, lowest from load 0.9 on
    (NaN: no such load)."""

    worst: float
    worst_load: float
    gain: float

    def holds(self) -> bool:
        return self.worst >= -0.01


def one(policy: str, rows: Sequence[Row], world: World, limits: Limits, speed: float, load: float, seed: int) -> Result:
    """`policy` on the trace, played `speed` times as fast as it was recorded; `load` is what that is called."""
    jobs = Cluster(world, limits, POLICIES[policy](seed)).run(rows, speed)
    return measure(policy, load, jobs, limits)


def saturation(rows: Sequence[Row], world: World, limits: Limits, seed: int) -> float | None:
    """How fast the trace is played where round robin's goodput has its (first) peak. None: it has none, as a trace of a few
    requests, which are served however fast they come."""
    if not rows[-1].at:
        return None

    def goodput(speed: float) -> float:
        return one("round robin", rows, world, limits, speed, speed, seed).goodput

    speed = LIGHT * full(rows, world)
    best, best_speed = goodput(speed), speed
    for _ in range(MOST):
        speed *= GROWTH
        seen = goodput(speed)
        if seen > best:
            best, best_speed = seen, speed
        elif seen < FALLEN * best:
            break
    else:
        return None
    for speed in [best_speed * GROWTH ** (step / 4) for step in (-3, -2, -1, 1, 2, 3)]:
        seen = goodput(speed)
        if seen > best:
            best, best_speed = seen, speed
    return best_speed


def full(rows: Sequence[Row], world: World) -> float:
    """How fast the trace is played where it takes all of the busier phase, nothing being cached."""
    span = rows[-1].at or 1.0
    prefill = sum(row.prompt for row in rows) / (world.prefill_workers * world.prefill_rate)
    pace = world.step + world.step_per_sequence * world.batch
    slots = sum(row.output for row in rows) * pace / (world.decode_workers * world.batch)
    room = sum(row.output * (row.prompt + row.output) for row in rows) * pace / (world.decode_workers * world.decode_kv)
    return span / max(prefill, slots, room)


def compare(
    policies: Sequence[str],
    rows: Sequence[Row],
    world: World,
    limits: Limits,
    loads: Sequence[float],
    peak: float,
    seed: int,
) -> Iterator[Result]:
    """One result for each load and policy, as it comes."""
    for load in loads:
        for policy in policies:
            yield one(policy, rows, world, limits, peak * load, load, seed)


def verdict(results: Sequence[Result]) -> Verdict:
    """Of a comparison in which "ours" and "round robin" took part."""
    by_load: dict[float, dict[str, float]] = {}
    for result in results:
        by_load.setdefault(result.load, {})[result.policy] = result.goodput
    worst, load = min((_over(goodput["ours"], max(goodput.values())), load) for load, goodput in by_load.items())
    gains = [_over(goodput["ours"], goodput["round robin"]) for load, goodput in by_load.items() if load >= 0.9]
    return Verdict(worst, load, min(gains, default=float("nan")))


def _over(goodput: float, other: float) -> float:
    """By which share it is more; 0 when both are nothing."""
    return goodput / other - 1 if other else float("inf") if goodput else 0.0


def sweep(world: World) -> Iterator[tuple[str, World]]:
    """`world` with each rate and each capacity halved and doubled."""
    for factor in (0.5, 2.0):
        yield f"prefill rate x{factor:g}", replace(world, prefill_rate=world.prefill_rate * factor)
        yield (
            f"decode rate x{factor:g}",
            replace(world, step=world.step / factor, step_per_sequence=world.step_per_sequence / factor),
        )
        yield f"prefill cache x{factor:g}", replace(world, prefill_cache=int(world.prefill_cache * factor))
        yield f"decode KV x{factor:g}", replace(world, decode_kv=max(1, int(world.decode_kv * factor)))
        yield f"decode batch x{factor:g}", replace(world, batch=max(1, int(world.batch * factor)))
