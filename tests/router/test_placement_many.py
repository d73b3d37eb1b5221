"""Of many decode workers that are near-ties only some are looked at: the draw stays fair, and nobody is missed who matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from schemas.state import Role
from services.router import placement
from services.router.placement import Impossible, Local, Pair, place
from services.router.placement_request import Request
from services.router.placement_survey import HOST_LOAD, MANY, ROUNDING, TIE_LOAD, survey
from services.router.placement_workers import Worker, pools
from tests.router.fakes import a_process
from tests.router.test_placement import P, worker
from tests.router.test_placement_nearest import KINDS, of_everybody, some

SHORT = Request(32)
"""Two blocks and one, of a thousand: whatever a worker has, with it it is hardly fuller."""


def decoder(process: str, **changes: object) -> Worker:
    return worker(process, Role.DECODE, **({"kv_total": 1000, "kv_blocks": 900, "decode_slots": 64, "step_s": 0.02} | changes))


ALIKE = [decoder(f"d{number}") for number in range(128)]
FULLER = decoder("fuller", kv_blocks=800)
NAMES = [a_process(f"w{number}") for number in range(60)]


def chosen(decode: Sequence[Worker], request: Request = SHORT, prefill: Worker = P) -> Counter[str]:
    """Who goes on, of 50 decisions a worker."""
    seen, view, random = Counter[str](), pools([prefill, *decode]), Random(1)
    for _ in range(50 * len(decode)):
        decision = place(view, request, 0.0, random)
        assert isinstance(decision, Pair)
        seen[decision.decode] += 1
    return seen


def test_each_of_many_is_as_likely() -> None:
    seen = chosen(ALIKE)
    assert len(seen) == len(ALIKE)
    assert 20 < min(seen.values()) <= max(seen.values()) < 90, "50 each, give or take 7"


def test_each_is_as_likely_whoever_is_fuller() -> None:
    seen = chosen([*ALIKE[:40], *(replace(FULLER, process=f"fuller{number}") for number in range(40))])
    assert set(seen) == {one.process for one in ALIKE[:40]}
    assert 65 < min(seen.values()) <= max(seen.values()) < 140, "100 each, give or take 10"


def test_only_so_many_are_looked_at() -> None:
    [pool] = pools([P, *ALIKE])
    assert len(survey(pool, SHORT, 0.0, frozenset(), Random(1)).decode) == MANY
    assert len(survey(pool, SHORT, 0.0, frozenset()).decode) == len(ALIKE)


def test_those_on_the_host_of_prefill_are_preferred_among_many() -> None:
    here = [replace(FULLER, process=f"here{number}", host="a", kv_blocks=850) for number in range(2)]
    seen = chosen([*(replace(one, host="b") for one in ALIKE), *here], prefill=replace(P, host="a"))
    assert set(seen) == {"here0", "here1"}


@pytest.mark.parametrize(
    "changes", [{"draining": True}, {"degraded": True}, {"decode_slots": 0}, {"kv_blocks": 2}, {"kv_blocks": 700}]
)
def test_one_on_the_host_of_prefill_must_be_able_and_close(changes: dict[str, object]) -> None:
    here = decoder("here", host="a", **changes)
    assert "here" not in chosen([*ALIKE, here], prefill=replace(P, host="a"))


def test_a_host_that_a_worker_left_is_forgotten() -> None:
    [pool] = pools([decoder("d1", host="a"), decoder("d2", host="a"), decoder("d3", host="b")])
    pool.put(decoder("d1", host="b"))
    pool.drop("d3")
    assert [one.process for one in pool.decode_on("a")] == ["d2"]
    assert [one.process for one in pool.decode_on("b")] == ["d1"]
    pool.drop("d2")
    assert not pool.decode_on("a")


def test_who_has_much_of_a_long_prompt_is_found_among_many() -> None:
    assert set(chosen(ALIKE, Request(800, hits={"d77": 49}))) == {"d77"}


def test_who_has_credit_is_found_among_many_that_have_none() -> None:
    full = [replace(one, kv_total=3, kv_blocks=2) for one in ALIKE]
    assert set(chosen([*full, replace(FULLER, kv_blocks=3)])) == {"fuller"}


def test_a_tail_goes_to_who_has_the_prompt_among_many() -> None:
    able = [replace(one, token_s=0.01, prefill_tokens=512) for one in ALIKE]
    view = pools([worker("p1", Role.PREFILL, token_s=0.01), *able])
    assert place(view, Request(160, hits={"d77": 9}), 0.0, Random(1)) == Local("d77", 11)


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_what_can_be_placed_is_placed_and_nearly_as_well_as_by_looking_at_everybody(first: int) -> None:
    for seed in range(first, first + 50):
        random = Random(seed)
        kind, roles = random.choice(KINDS), [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, Role.BOTH]
        workers = [some(name, random.choice(roles), kind, random) for name in NAMES]
        view = pools(replace(one, kv_total=10 * one.kv_total, kv_blocks=10 * one.kv_blocks) for one in workers)
        hits = {name: random.randint(1, 3) for name in NAMES if random.random() < 0.1}
        request = Request(random.randint(16, 400), hits=hits, urgent=random.random() < 0.5)
        without = frozenset(random.sample(NAMES, random.choice([0, 30, 55])))
        decision = place(view, request, 1.0, Random(seed), without)
        with patch.object(placement, "survey", of_everybody):
            thorough = place(view, request, 1.0, Random(seed), without)
        assert isinstance(decision, Pair | Local) == isinstance(thorough, Pair | Local), seed
        assert isinstance(decision, Impossible) == isinstance(thorough, Impossible), seed
        if isinstance(decision, Pair) and isinstance(thorough, Pair):
            assert decision.why is not None
            assert thorough.why is not None
            assert decision.why.load <= thorough.why.load + HOST_LOAD + 2 * TIE_LOAD + ROUNDING, seed
