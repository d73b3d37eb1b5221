"""A decision that stops early is the one that looks at everybody would make; and the orders it relies on are kept."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from schemas.state import Role
from services.router import placement
from services.router.placement import Impossible, NoCredit, Pair, place
from services.router.placement_request import Request
from services.router.placement_survey import ROUNDING, Survey, survey
from services.router.placement_workers import Pool, Worker, by_load, by_urgent_wait, by_wait, pools
from tests.router.fakes import a_process
from tests.router.test_placement import D, worker

NAMES = [a_process(f"w{number}") for number in range(12)]
SEEDS = range(0, 4000, 100)


KINDS = (
    {"free_at": [0.0, 1.0, 1.001, 1.002], "token_s": [0.001]},
    {"free_at": [0.0, 1.001, 1.2, 3.0], "token_s": [0.001, 0.00101, 0.0004, 0.0]},
    {"free_at": [3.0, 3.001, 4.0], "token_s": [0.001]},
)
"""Of pools: idle and alike, mixed, busy."""


def some(process: str, role: Role, kind: dict[str, list[float]], random: Random) -> Worker:
    """Mostly alike, so that there are many near-ties."""
    draw = random.choice
    return worker(
        process,
        role,
        context_length=draw([1024, 1024, 1024, 64]),
        kv_total=draw([100] * 8 + [4, 0]),
        queued=draw([0, 0, 0, 1, 2]),
        running=draw([0, 1, 2]),
        prefill_tokens=draw([-50, 100, 200, 400]),
        decode_slots=draw([60, 60, 3, 0]),
        kv_blocks=draw([100, 98, 95, 90, 80, 5, -3]),
        draining=draw([False] * 9 + [True]),
        degraded=draw([False] * 19 + [True]),
        free_at=draw(kind["free_at"] if role is not Role.DECODE else [0.0]),
        yield_s=draw([0.0, 0.1, 2.0]),
        yield_queued=draw([0, 1]),
        token_s=draw(kind["token_s"]),
        fetch_token_s=draw([0.0, 0.0, 0.0001]),
        step_s=draw([0.0, 0.02]),
        host=draw(["", "a", "b"]),
    )


def a_pool(random: Random) -> Pool:
    """Up to twelve workers, some of which changed or left since they were first seen."""
    kind, names = random.choice(KINDS), NAMES[: random.randint(1, len(NAMES))]
    [pool] = pools([some(name, random.choice(list(Role)), kind, random) for name in names])
    for old in list(pool.workers()):
        if random.random() < 0.5:
            pool.put(some(old.process, old.role, kind, random))
        elif random.random() < 0.1:
            pool.drop(old.process)
    return pool


def a_request(random: Random) -> Request:
    cached = random.choice([0.0, 0.0, 0.3])
    return Request(
        tokens=random.randint(16, 400),
        hits={name: random.randint(1, 3) for name in NAMES if random.random() < cached},
        patience=random.choice([0.0, 0.2, 5.0]),
        urgent=random.random() < 0.5,
    )


def of_everybody(pool: Pool, request: Request, now: float, without: Set[str], *_: object) -> Survey:
    return survey(pool, request, now, without)


@pytest.mark.parametrize("first", SEEDS)
def test_the_same_is_decided_as_by_looking_at_everybody(first: int) -> None:
    for seed in range(first, first + 100):
        random = Random(seed)
        view, request = [a_pool(random)], a_request(random)
        without = frozenset(random.sample(NAMES, random.choice([0, 0, 1, 2])))
        decision = place(view, request, 1.0, Random(seed), without)
        with patch.object(placement, "survey", of_everybody):
            thorough = place(view, request, 1.0, Random(seed), without)
        assert type(decision) is type(thorough), seed
        assert decision == thorough or isinstance(decision, Impossible), seed


@pytest.mark.parametrize("first", SEEDS)
def test_no_worker_costs_less_than_its_place_in_the_order_says(first: int) -> None:
    for seed in range(first, first + 10):
        random = Random(seed)
        pool, request = a_pool(random), a_request(random)
        found, wait = survey(pool, request, 1.0, frozenset()), by_urgent_wait if request.urgent else by_wait
        alone = [way for way in found.alone if way[1].role is Role.BOTH]
        assert all(cost >= wait(one) - 1.0 + found.least_s - ROUNDING for cost, one in found.prefill + alone), seed
        assert all(load >= by_load(one) for load, one in found.decode), seed


@pytest.mark.parametrize("first", SEEDS)
def test_an_order_holds_all_who_do_not_drain_the_well_first(first: int) -> None:
    for seed in range(first, first + 10):
        pool = a_pool(Random(seed))
        for role in Role:
            able = [one for one in pool.of(role).values() if not one.draining]
            expected = {one.process for one in able if not one.degraded} or {one.process for one in able}
            for urgent in (False, True):
                entries = pool.well(role, urgent)
                assert {process for _, _, process, _ in entries} == expected, seed
                assert [key for _, key, _, _ in entries] == sorted(key for _, key, _, _ in entries), seed
                assert all(pool.of(role)[process] is one for _, _, process, one in entries), seed


def test_only_the_first_few_are_looked_at() -> None:
    busy = [worker(f"p{number}", Role.PREFILL, free_at=0.1 * number, token_s=0.001) for number in range(100)]
    full = [worker(f"d{number}", Role.DECODE, kv_blocks=100 - number) for number in range(100)]
    [pool] = pools(busy + full)
    found = survey(pool, Request(32), 0.0, frozenset(), random=Random(1))
    assert len(found.prefill) == 1
    assert len(found.decode) < 50


@pytest.mark.parametrize(("urgent", "prefill"), [(True, "p1"), (False, "p2")])
def test_an_urgent_prompt_does_not_wait_for_what_makes_way_for_it(urgent: bool, prefill: str) -> None:
    long = worker("p1", Role.PREFILL, free_at=3.0, yield_s=2.9, token_s=0.001)
    other = worker("p2", Role.PREFILL, free_at=0.5, token_s=0.001)
    decision = place(pools([long, other, D]), Request(32, urgent=urgent), 0.0, Random(1))
    assert isinstance(decision, Pair)
    assert decision.prefill == prefill
    assert decision.why is not None
    assert decision.why.wait_s == pytest.approx(0.1 if urgent else 0.5)


@pytest.mark.parametrize(("urgent", "yields", "placed"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_what_makes_way_for_an_urgent_prompt_takes_no_credit_from_it(urgent: bool, yields: int, placed: bool) -> None:
    full = worker("p1", Role.PREFILL, queued=1, prefill_tokens=0, yield_queued=yields)
    decision = place(pools([full, D]), Request(32, urgent=urgent), 0.0, Random(1))
    assert isinstance(decision, Pair) is placed


def test_a_prefill_without_credit_is_not_waited_for_when_no_decode_could_go_on() -> None:
    both = worker("b1", Role.BOTH, free_at=0.5, token_s=0.001)
    soon = worker("p1", Role.PREFILL, queued=1, prefill_tokens=0, token_s=0.001)
    full = replace(D, decode_slots=0)
    request = Request(32, patience=1.0)
    assert place(pools([both, soon, D]), request, 0.0, Random(1)) == NoCredit("better_soon")
    assert place(pools([both, soon, full]), request, 0.0, Random(1)) == placement.Local("b1", 3)
