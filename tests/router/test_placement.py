from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ContextLengthExceeded, ModelChanged, ModelLoading
from schemas.job import Choice
from schemas.state import Role
from services.router.placement import Decision, Impossible, Local, NoCredit, Pair, Why
from services.router.placement import place as place_in
from services.router.placement_request import Request
from services.router.placement_survey import has_decode_credit, has_prefill_credit
from services.router.placement_workers import Worker, pools
from tests.router.fakes import a_job


def worker(process: str, role: Role, **changes: object) -> Worker:
    values: dict[str, object] = {
        "kv_compat": "kv",
        "weights": "w",
        "context_length": 1024,
        "block_tokens": 16,
        "kv_total": 100,
        "prefill_tokens": 0 if role is Role.DECODE else 512,
        "decode_slots": 4,
        "kv_blocks": 100,
    }
    return Worker(process=process, role=role, **(values | changes))  # type: ignore[arg-type]


def place(
    workers: Sequence[Worker], request: Request, random: Random, without: frozenset[str] = frozenset(), now: float = 0.0
) -> Decision:
    return place_in(pools(workers), request, now, random, without)


P = worker("p1", Role.PREFILL)
D = worker("d1", Role.DECODE)
B = worker("b1", Role.BOTH)


def decide(workers: list[Worker], tokens: int = 32, weights: str = "", without: frozenset[str] = frozenset()) -> object:
    return place(workers, Request(tokens, weights), Random(1), without)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param([P, D], Pair("p1", "d1", 3), id="a pair, prompt blocks plus one"),
        pytest.param([B], Local("b1", 3), id="both phases on one"),
        pytest.param([D], Local("d1", 3), id="decode alone prefills locally"),
        pytest.param([P], NoCredit("no_pair"), id="prefill alone waits for a decode"),
        pytest.param([P, D, worker("d2", Role.DECODE, degraded=True, kv_blocks=100)], Pair("p1", "d1", 3), id="who is well"),
        pytest.param([P, worker("d2", Role.DECODE, degraded=True)], Pair("p1", "d2", 3), id="the last of its pool, degraded"),
        pytest.param(
            [worker("p2", Role.PREFILL, degraded=True), D, worker("b1", Role.BOTH)], Local("b1", 3), id="a worker of both first"
        ),
        pytest.param(
            [worker("p2", Role.PREFILL, degraded=True), worker("d1", Role.DECODE, prefill_tokens=512)],
            Local("d1", 3),
            id="decode computes it first",
        ),
        pytest.param(
            [P, worker("d1", Role.DECODE, decode_slots=0), worker("d2", Role.DECODE, degraded=True)],
            NoCredit("no_credit"),
            id="rather wait than go to the degraded",
        ),
        pytest.param(
            [P, worker("d1", Role.DECODE, kv_compat="other")],
            Local("d1", 3),
            id="decode without a prefill it can pair with is alone",
        ),
        pytest.param(
            [worker("p1", Role.PREFILL, queued=1, prefill_tokens=0), D],
            NoCredit("no_credit"),
            id="a busy prefill does not make decode prefill",
        ),
        pytest.param([worker("p1", Role.PREFILL, queued=1, prefill_tokens=32), D], Pair("p1", "d1", 3), id="just enough tokens"),
        pytest.param([worker("p1", Role.PREFILL, queued=1, prefill_tokens=31), D], NoCredit("no_credit"), id="one token short"),
        pytest.param(
            [worker("p1", Role.PREFILL, prefill_tokens=0), D], Pair("p1", "d1", 3), id="nothing queued takes any length"
        ),
        pytest.param([P, worker("d1", Role.DECODE, decode_slots=0)], NoCredit("no_credit"), id="no slot"),
        pytest.param([P, worker("d1", Role.DECODE, kv_blocks=2)], NoCredit("no_credit"), id="one block short"),
        pytest.param([P, worker("d1", Role.DECODE, kv_blocks=3)], Pair("p1", "d1", 3), id="just enough blocks"),
        pytest.param([worker("p1", Role.PREFILL, draining=True), D], Local("d1", 3), id="a draining prefill is as none"),
        pytest.param([P, worker("d1", Role.DECODE, draining=True)], NoCredit("no_pair"), id="a draining decode is not used"),
        pytest.param(
            [worker("p1", Role.PREFILL, queued=2), worker("p2", Role.PREFILL, queued=1), D],
            Pair("p2", "d1", 3),
            id="the shorter queue",
        ),
        pytest.param(
            [P, worker("d1", Role.DECODE, kv_blocks=50), worker("d2", Role.DECODE, kv_blocks=60)],
            Pair("p1", "d2", 3),
            id="the emptier decode",
        ),
        pytest.param(
            [
                worker("p1", Role.PREFILL, kv_compat="a"),
                worker("d1", Role.DECODE, kv_compat="a", decode_slots=0),
                worker("p2", Role.PREFILL, kv_compat="b", queued=3),
                worker("d2", Role.DECODE, kv_compat="b"),
            ],
            Pair("p2", "d2", 3),
            id="equal kv_compat, whatever the load",
        ),
        pytest.param(
            [worker("b1", Role.BOTH, running=3), P, D],
            Pair("p1", "d1", 3),
            id="a pair that is less loaded than both",
        ),
    ],
)
def test_table(workers: list[Worker], expected: object) -> None:
    assert decide(workers) == expected


def test_who_refused_is_left_out() -> None:
    p2 = worker("p2", Role.PREFILL, queued=1)
    assert decide([P, p2, D]) == Pair("p1", "d1", 3)
    assert decide([P, p2, D], without=frozenset({"p1"})) == Pair("p2", "d1", 3)
    assert decide([P, p2, D], without=frozenset({"p1", "p2"})) == NoCredit("no_credit")


@pytest.mark.parametrize(
    ("workers", "tokens", "weights", "error"),
    [
        pytest.param([], 1, "", ModelLoading, id="nobody serves the model"),
        pytest.param([P, D], 1024, "", ContextLengthExceeded, id="no room for one more token"),
        pytest.param([P, worker("d1", Role.DECODE, kv_total=3)], 48, "", ContextLengthExceeded, id="more blocks than decode has"),
        pytest.param([worker("p1", Role.PREFILL, kv_total=2), D], 48, "", ContextLengthExceeded, id="more than prefill has"),
        pytest.param([P, D], 1, "other", ModelChanged, id="a resume whose weights are gone"),
    ],
)
def test_impossible(workers: list[Worker], tokens: int, weights: str, error: type[Exception]) -> None:
    decision = decide(workers, tokens, weights)
    assert isinstance(decision, Impossible)
    assert type(decision.error) is error


def test_a_model_that_loads_says_when_to_ask_again() -> None:
    decision = decide([])
    assert isinstance(decision, Impossible)
    assert decision.error.status == 503
    assert decision.error.retry_after


def test_a_prompt_that_only_one_pair_can_hold_goes_there() -> None:
    small = [worker("p1", Role.PREFILL, context_length=64), worker("d1", Role.DECODE, context_length=64)]
    large = [worker("p2", Role.PREFILL, queued=5, prefill_tokens=512), worker("d2", Role.DECODE, kv_blocks=30)]
    assert decide(small + large, tokens=100) == Pair("p2", "d2", 8)


def test_the_full_pool_of_a_worker_that_could_hold_it_is_no_credit() -> None:
    assert decide([P, worker("d1", Role.DECODE, kv_blocks=0)], tokens=1000) == NoCredit("no_credit")


def test_a_resume_goes_only_where_the_weights_are_equal() -> None:
    old = [
        worker("p2", Role.PREFILL, weights="old", kv_compat="o", queued=1),
        worker("d2", Role.DECODE, weights="old", kv_compat="o"),
    ]
    assert decide([P, D, *old], weights="old") == Pair("p2", "d2", 3)


def test_a_resume_waits_for_a_draining_holder_of_its_weights() -> None:
    assert decide([worker("b1", Role.BOTH, draining=True)], weights="w") == NoCredit("no_pair")


def test_a_resume_counts_what_was_generated() -> None:
    assert Request.of(a_job(tokens=10, generated=(1, 2, 3), resume=True)) == Request(tokens=13)


def test_room_for_several_choices() -> None:
    """The prompt once; a block for each choice to write, and what it has generated."""
    job = msgspec.structs.replace(a_job(tokens=40), n=3, choices=tuple(Choice(index=index) for index in range(3)))
    assert Request.of(job) == Request(tokens=40, branches=(0, 0, 0))
    assert place([P, D], Request.of(job), Random(1)) == Pair("p1", "d1", 3 + 3)
    resumed = (Choice(index=0, generated=(1,) * 20), Choice(index=1, done=True), Choice(index=2, generated=(1,)))
    request = Request.of(msgspec.structs.replace(job, choices=resumed))
    assert request == Request(tokens=60, branches=(20, 1))
    assert place([P, D], request, Random(1)) == Pair("p1", "d1", 3 + (2 + 1) + (1 + 1))
    alone = (Choice(index=0, generated=(1,) * 20), Choice(index=1, done=True), Choice(index=2, done=True))
    assert Request.of(msgspec.structs.replace(job, choices=alone)) == Request(tokens=60)
    assert place([P, worker("d1", Role.DECODE, kv_blocks=5)], Request.of(job), Random(1)) == NoCredit("no_credit")


def test_ties_spread() -> None:
    workers = [worker(f"p{i}", Role.PREFILL) for i in range(4)] + [worker(f"d{i}", Role.DECODE) for i in range(4)]
    random = Random(3)
    seen: Counter[str] = Counter()
    for _ in range(400):
        decision = place(workers, Request(32), random)
        assert isinstance(decision, Pair)
        seen.update([decision.prefill, decision.decode])
    assert set(seen) == {w.process for w in workers}
    assert min(seen.values()) > 50


workers_strategy = st.lists(
    st.builds(
        worker,
        process=st.uuids().map(str),
        role=st.sampled_from(Role),
        kv_compat=st.sampled_from("ab"),
        context_length=st.sampled_from([64, 1024]),
        kv_total=st.sampled_from([0, 4, 100]),
        queued=st.integers(0, 2),
        running=st.integers(0, 3),
        prefill_tokens=st.integers(-50, 200),
        decode_slots=st.integers(-1, 2),
        kv_blocks=st.integers(-3, 12),
        draining=st.booleans(),
    ),
    max_size=6,
)


@given(workers_strategy, st.integers(1, 150), st.integers(0, 2**32))
def test_credit_is_kept_and_enough(workers: list[Worker], tokens: int, seed: int) -> None:
    """Chosen: with credit, never draining. Not chosen: no admissible way exists (by brute force over all ways)."""
    by_name = {w.process: w for w in workers}
    decision = place(workers, Request(tokens), Random(seed))
    match decision:
        case Pair(prefill, decode, blocks):
            p, d = by_name[prefill], by_name[decode]
            assert _may_prefill(p, tokens)
            assert _may_decode(d, tokens)
            assert p.kv_compat == d.kv_compat
            assert blocks == Request(tokens).room(d.block_tokens)
        case Local(decode, _):
            assert _may_prefill(by_name[decode], tokens)
            assert _may_decode(by_name[decode], tokens)
        case _:
            assert not any(
                _may_prefill(p, tokens) and _may_decode(d, tokens)
                for p in workers
                for d in workers
                if (p.role is Role.PREFILL and d.role is Role.DECODE and p.kv_compat == d.kv_compat)
                or (p is d and p.role is Role.BOTH)
                or (p is d and p.role is Role.DECODE and tokens <= d.prefill_tokens)
            )


def _may_prefill(w: Worker, tokens: int) -> bool:
    fits = tokens < w.context_length and Request(tokens).blocks(w.block_tokens) <= w.kv_total
    return not w.draining and fits and has_prefill_credit(w, tokens, urgent=False)


def _may_decode(w: Worker, tokens: int) -> bool:
    fits = tokens < w.context_length and Request(tokens).room(w.block_tokens) <= w.kv_total
    return not w.draining and fits and has_decode_credit(w, Request(tokens).room(w.block_tokens))


def test_suspects_go_to_one_worker_whatever_its_load() -> None:
    pool = [
        worker(f"{name}{n}", role, queued=9 - n) for n in (1, 2, 3) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    suspect = Request(32, suspect=True)
    assert {place(pool, suspect, Random(seed)) for seed in range(20)} == {Pair("p1", "d1", 3)}
    assert place(pool, suspect, Random(1), frozenset({"d1"})) == NoCredit("no_credit"), "not to the next best"
    both = [worker(f"b{n}", Role.BOTH) for n in (2, 1)]
    assert place(both, suspect, Random(1)) == Local("b1", 3)


def test_the_tail_of_a_cached_prompt_is_prefilled_by_decode_when_that_is_faster() -> None:
    busy = worker("p1", Role.PREFILL, free_at=2.0, token_s=0.001)
    idle = worker("p1", Role.PREFILL, token_s=0.001)
    holder = worker("d1", Role.DECODE, prefill_tokens=64, token_s=0.001, step_s=0.02)
    cached = Request(tokens=200, hits={"d1": 10})
    assert place([busy, holder], cached, Random(1)) == Local("d1", 14)
    assert place([busy, holder], Request(tokens=200), Random(1)) == Pair("p1", "d1", 14), "that is no small tail"
    assert place([idle, holder], Request(tokens=40), Random(1)) == Pair("p1", "d1", 4), "prefill is as fast"
    full = worker("d1", Role.DECODE, prefill_tokens=39, token_s=0.001, step_s=0.02)
    assert place([busy, full], cached, Random(1)) == Pair("p1", "d1", 14), "one step would not do"


def test_a_crowded_decode_does_not_make_its_batch_wait_for_a_small_gain() -> None:
    busy = worker("p1", Role.PREFILL, free_at=0.1, token_s=0.001)
    crowd = worker("d1", Role.DECODE, prefill_tokens=64, token_s=0.001, running=100)
    assert place([busy, crowd], Request(tokens=200, hits={"d1": 10}), Random(1)) == Pair("p1", "d1", 14)


def test_a_cached_prefix_attracts_and_spills() -> None:
    def decide(queue_s: float) -> object:
        hot = worker("p1", Role.PREFILL, free_at=queue_s, token_s=0.001)
        cold = worker("p2", Role.PREFILL, token_s=0.001)
        return place([hot, cold, D], Request(tokens=330, hits={"p1": 20}), Random(1))

    assert decide(0.0) == Pair("p1", "d1", 22)
    assert decide(0.3) == Pair("p1", "d1", 22), "waiting costs less than computing 320 tokens again"
    assert decide(0.35) == Pair("p2", "d1", 22)


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    decision = place([P, D], Request(tokens=32, hits={"p1": 2}), Random(1))
    assert isinstance(decision, Pair)
    assert decision.uncached == 16


def test_uncached_tokens_are_what_needs_credit() -> None:
    queued = worker("p1", Role.PREFILL, queued=1, prefill_tokens=16)
    assert place([queued, D], Request(tokens=160, hits={"p1": 9}), Random(1)) == Pair("p1", "d1", 11)
    assert place([queued, D], Request(tokens=160, hits={"p1": 8}), Random(1)) == NoCredit("no_credit")


def test_a_patient_job_waits_for_a_worker_that_is_soon_much_better() -> None:
    hot = worker("p1", Role.PREFILL, queued=1, prefill_tokens=0, free_at=0.2, token_s=0.001)
    cold = worker("p2", Role.PREFILL, token_s=0.001)
    request = Request(tokens=800, hits={"p1": 49}, patience=1.0)
    assert place([hot, cold, D], request, Random(1)) == NoCredit("better_soon")
    assert place([hot, cold, D], replace(request, patience=0.1), Random(1)) == Pair("p2", "d1", 51)
    assert place([replace(hot, free_at=0.7), cold, D], request, Random(1)) == Pair("p2", "d1", 51), "hardly better"


def test_one_host_is_preferred_when_close() -> None:
    prefill = worker("p1", Role.PREFILL, host="a")
    there = worker("d1", Role.DECODE, kv_blocks=60, host="b")
    here = worker("d2", Role.DECODE, kv_blocks=55, host="a")
    assert place([prefill, there, here], Request(32), Random(1)) == Pair("p1", "d2", 3)
    assert place([prefill, there, replace(here, kv_blocks=40)], Request(32), Random(1)) == Pair("p1", "d1", 3)


def test_a_decode_that_has_the_prefix_counts_as_emptier() -> None:
    one, other = worker("d1", Role.DECODE, kv_blocks=50), worker("d2", Role.DECODE, kv_blocks=47)
    assert place([P, one, other], Request(160, hits={"d2": 9}), Random(1)) == Pair("p1", "d2", 11)


def test_a_slow_worker_gets_less() -> None:
    slow, fast = worker("p1", Role.PREFILL, token_s=0.01), worker("p2", Role.PREFILL, token_s=0.001, free_at=0.2)
    assert place([slow, fast, D], Request(32), Random(1)) == Pair("p2", "d1", 3)


def test_a_decision_says_why() -> None:
    ready, refused = (
        worker("p1", Role.PREFILL, token_s=0.001, free_at=0.1),
        worker("p2", Role.PREFILL, queued=1, prefill_tokens=0),
    )
    decision = place([ready, refused, D], Request(48, hits={"p1": 1}), Random(1))
    assert isinstance(decision, Pair)
    assert decision.why == Why(ttft_s=pytest.approx(0.132), uncached=32, load=0.25, ready=2, refused=1, wait_s=0.1, kv=ANY)


@given(workers_strategy, st.integers(1, 150), st.integers(0, 2**32), st.floats(0.001, 10.0))
def test_patience_only_delays(workers: list[Worker], tokens: int, seed: int, patience: float) -> None:
    """What a job with patience is refused, it gets without; and what it is given, it would have got."""
    patient = place(workers, Request(tokens, patience=patience), Random(seed))
    if patient == NoCredit("better_soon"):
        assert isinstance(place(workers, Request(tokens), Random(seed)), Pair | Local)
    else:
        at_once = place(workers, Request(tokens), Random(seed))
        assert type(patient) is type(at_once)


def test_an_engine_that_begins_only_what_it_can_end_is_given_room_to_the_end() -> None:
    job = a_job(tokens=10, generated=(1, 2, 3))
    request, end = Request.of(job), 10 + job.sampling.max_tokens
    [pool] = pools([P, D])
    pool.to_end = True
    assert place_in([pool], request, 0.0, Random(1)) == Pair("p1", "d1", -(-end // 16))
    [small] = pools([P, worker("d1", Role.DECODE, kv_blocks=-(-end // 16) - 1)])
    small.to_end = True
    assert place_in([small], request, 0.0, Random(1)) == NoCredit("no_credit")
