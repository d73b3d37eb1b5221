"""Overload and late views, simulated: small worlds in which the sums can be told."""

from __future__ import annotations

from random import Random

from bench.routing_world.overload import SHARES, draw_tiers, overload
from bench.routing_world.settings import Limits, World
from bench.routing_world.stale import caps
from bench.routing_world.trace import Row
from schemas.job import Tier

WORLD = World(prefill_workers=2, decode_workers=2, batch=16, prefill_rate=10_000.0)
PROMPT = 2_000
"""Tokens: ten such prompts a second are all that WORLD computes."""


def rows(per_second: float, count: int = 1200) -> list[Row]:
    random = Random(4)
    at, made = 0.0, []
    for number in range(count):
        at += random.expovariate(per_second)
        made.append(Row(at, PROMPT, 8, (), number % 50))
    return made


def test_free_goes_first_and_enterprise_is_served_as_ever() -> None:
    result = overload(rows(20.0), WORLD, Limits(), peak=1.0, load=1.0, seed=1)
    enterprise, paid, free = (result.of(tier) for tier in Tier)
    assert enterprise.good > 0.95
    assert paid.good > free.good
    assert enterprise.refused <= paid.refused <= free.refused
    assert free.good > 0, "ageing keeps free from starving"
    assert result.goodput > 0.85 * 10.0
    assert result.truths


def test_with_room_nobody_is_turned_away() -> None:
    result = overload(rows(4.0), WORLD, Limits(), peak=1.0, load=1.0, seed=1)
    assert all(tier.refused == 0 for tier in result.tiers)


def test_tiers_are_drawn_by_seed() -> None:
    tiers = draw_tiers(10_000, 3)
    assert tiers == draw_tiers(10_000, 3)
    for tier, share in SHARES.items():
        assert abs(tiers.count(tier) / len(tiers) - share) < 0.02


def test_a_late_view_never_takes_a_worker_over_its_cap() -> None:
    found = caps(rows(20.0, count=600), WORLD, Limits(), speed=1.0, seed=1)
    assert found.refused > 0, "the late router was wrong at times"
    assert found.sequences <= found.batch
    assert found.over_a_step == 0
