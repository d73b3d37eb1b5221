"""Which tokens a step computes: decode first, prompts in order of their turns, no more than the time allows."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.job import Tier
from services.engine.scheduler import AHEAD_S, SCORED, Chunk, ChunkedScheduler, Step, choose_victim, makes_way
from services.engine.sequence import Sequence
from tests.engine.fakes import spec


def waiting(run: int, tokens: int, computed: int = 0, tier: Tier = Tier.PAID) -> Sequence:
    ids = [1] * tokens
    return Sequence(spec(run, ids, tier=tier), 0, ids, (), arrival=run, then_decode=True, computed=computed)


def decoding(run: int, tokens: int = 5, tier: Tier = Tier.PAID) -> Sequence:
    sequence = waiting(run, tokens, computed=tokens, tier=tier)
    sequence.ids.append(9)
    return sequence


def came(sequence: Sequence, at: float) -> Sequence:
    sequence.came_at = at
    return sequence


def scheduler(*, max_batch: int = 4, max_tokens: int = 64, target_s: float = 1.0) -> ChunkedScheduler:
    return ChunkedScheduler(max_batch=max_batch, max_tokens=max_tokens, target_s=target_s, chunk_tokens=16, alone_tokens=32)


def shape(step: Step | None) -> list[tuple[int, int, int, bool]]:
    assert step is not None
    return [(chunk.sequence.run, chunk.start, chunk.count, chunk.samples) for chunk in step.chunks]


def measured(policy: ChunkedScheduler, tokens: int, seconds: float) -> ChunkedScheduler:
    policy.observe(Step((Chunk(waiting(99, tokens), 0, tokens, samples=True),)), seconds)
    return policy


def test_nothing_to_do() -> None:
    assert scheduler().plan([]) is None


def test_decode_rows_come_first_then_prompts_in_order_of_arrival() -> None:
    step = scheduler().plan([waiting(1, 8), decoding(2), waiting(3, 10, computed=4), decoding(4, 7)])
    assert shape(step) == [(2, 5, 1, True), (4, 7, 1, True), (1, 0, 8, True), (3, 4, 6, True)]


def test_the_prompt_that_does_not_fit_is_cut_and_the_next_one_waits() -> None:
    step = scheduler().plan([waiting(1, 30), waiting(2, 40), waiting(3, 5)])
    assert shape(step) == [(1, 0, 30, True), (2, 0, 2, False)]


def test_an_enterprise_prompt_comes_before_others_that_came_not_long_ago() -> None:
    """Also when they are half computed; who waited long enough is not overtaken any more."""
    begun, queued = came(waiting(1, 60, computed=32), 10.0), came(waiting(2, 10, tier=Tier.FREE), 11.0)
    urgent = came(waiting(3, 20, tier=Tier.ENTERPRISE), 10.0 + AHEAD_S - 0.1)
    assert shape(scheduler().plan([begun, queued, urgent])) == [(3, 0, 20, True), (1, 32, 12, False)]
    late = came(waiting(3, 20, tier=Tier.ENTERPRISE), 10.0 + AHEAD_S + 0.1)
    assert shape(scheduler().plan([begun, queued, late])) == [(1, 32, 28, True), (3, 0, 4, False)]


def test_a_long_prompt_delays_much_shorter_ones_by_the_step_in_progress() -> None:
    """The shortest first; a quarter is the long one's, and what they leave."""
    step = scheduler().plan([waiting(1, 500, computed=64), waiting(2, 16), waiting(3, 9)])
    assert shape(step) == [(3, 0, 9, True), (2, 0, 15, False), (1, 64, 8, False)]
    assert shape(scheduler().plan([waiting(1, 500), waiting(2, 5)])) == [(2, 0, 5, True), (1, 0, 27, False)]


def test_nearly_equal_prompts_are_computed_one_after_the_other() -> None:
    assert shape(scheduler().plan([waiting(1, 500), waiting(2, 251)])) == [(1, 0, 32, False)]
    assert shape(scheduler().plan([waiting(1, 500, computed=480), waiting(2, 10)])) == [(1, 480, 20, True), (2, 0, 10, True)]


async def test_who_holds_up_nobody_is_no_long_prompt() -> None:
    """It waits for its grammar, so what it could not compute is others' anyway."""
    pending = waiting(1, 500, computed=499)
    pending.grammar = asyncio.get_running_loop().create_future()
    assert shape(scheduler().plan([pending, waiting(2, 500), waiting(3, 8)])) == [(3, 0, 8, True), (2, 0, 24, False)]


def test_only_enterprise_prompts_are_computed_beside_a_long_enterprise_one() -> None:
    long = waiting(1, 500, tier=Tier.ENTERPRISE)
    step = scheduler().plan([long, waiting(2, 5), waiting(3, 6, tier=Tier.ENTERPRISE)])
    assert shape(step) == [(3, 0, 6, True), (1, 0, 26, False)]


@pytest.mark.parametrize(
    ("tier", "now", "yields"), [(Tier.PAID, 11.0, True), (Tier.PAID, 16.0, False), (Tier.ENTERPRISE, 11.0, False)]
)
def test_what_makes_way_is_what_an_enterprise_prompt_that_comes_now_overtakes(tier: Tier, now: float, yields: bool) -> None:
    sequence = came(waiting(1, 32, tier=tier), 10.0)
    assert makes_way(sequence, now) is yields
    step = scheduler().plan([sequence, came(waiting(2, 32, tier=Tier.ENTERPRISE), now)])
    assert shape(step)[0][0] == (2 if yields else 1)


def test_no_more_rows_than_the_batch_holds() -> None:
    assert shape(scheduler(max_batch=2).plan([decoding(run) for run in (1, 2, 3)])) == [(1, 5, 1, True), (2, 5, 1, True)]


@pytest.mark.parametrize(
    ("tokens", "seconds", "budget"),
    [
        (100, 2.0, 50),  # that many fit the second
        (100, 0.1, 64),  # never more than max_tokens
        (100, 50.0, 16),  # never less than `chunk_tokens`
    ],
)
def test_a_step_is_sized_by_time(tokens: int, seconds: float, budget: int) -> None:
    policy = measured(scheduler(), tokens, seconds)
    assert policy.prompt_budget == max(32, budget)
    assert shape(policy.plan([waiting(1, 500)])) == [(1, 0, budget, False)]


def test_decode_rows_take_their_part_of_the_time() -> None:
    policy = measured(scheduler(), 100, 2.0)
    rows = [decoding(run) for run in (1, 2, 3, 4)]
    assert shape(policy.plan([*rows, waiting(5, 500)]))[-1] == (5, 0, 46, False)
    policy = measured(scheduler(), 100, 50.0)
    assert shape(policy.plan([*rows, waiting(5, 500)]))[-1] == (5, 0, 16, False)


def test_the_short_end_of_a_prompt_hardly_changes_the_rate() -> None:
    policy = measured(measured(scheduler(), 100, 2.0), 1, 0.1)
    assert policy.prompt_budget == 47
    for _ in range(3):
        measured(policy, 64, 1.28)
    assert policy.prompt_budget == 49


def test_a_step_grows_again_after_the_machine_was_slow() -> None:
    """A step reads all weights, whatever its rows: small ones have a small rate. 50 tokens fit the target here."""
    policy = scheduler(target_s=0.06)
    for turn in range(80):
        step = policy.plan([waiting(1, 500)])
        assert step is not None
        policy.observe(step, (0.02 + 0.0008 * step.prompt_tokens) * (10 if turn < 20 else 1))
        assert turn != 19 or step.prompt_tokens == 16
    assert 45 <= step.prompt_tokens <= 50


def test_steps_that_only_decode_say_nothing_of_prompts() -> None:
    policy = measured(scheduler(), 100, 2.0)
    policy.observe(Step((Chunk(decoding(1), 5, 1, samples=True),)), 0.9)
    assert policy.prompt_budget == 50


def test_a_limit_below_the_smallest_chunk_holds() -> None:
    assert shape(scheduler(max_tokens=5).plan([waiting(1, 50)])) == [(1, 0, 5, False)]
    assert shape(measured(scheduler(max_tokens=5), 5, 9.0).plan([waiting(1, 50)])) == [(1, 0, 5, False)]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.floats(0.0001, 0.2), st.integers(1, 80))
def test_every_prompt_token_is_computed_once_in_order(lengths: list[int], token_s: float, max_tokens: int) -> None:
    policy = scheduler(max_tokens=max_tokens)
    sequences = [waiting(run, length) for run, length in enumerate(lengths)]
    for _ in range(sum(lengths)):
        step = policy.plan(sequence for sequence in sequences if sequence.uncomputed)
        if step is None:
            break
        assert 0 < step.prompt_tokens <= max_tokens
        oldest = next(sequence for sequence in sequences if sequence.uncomputed)
        (own,) = [chunk.count for chunk in step.chunks if chunk.sequence is oldest]
        assert own >= min(oldest.uncomputed, max(1, step.prompt_tokens // 4)), "nobody starves"
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.computed
            chunk.sequence.computed += chunk.count
            assert chunk.samples == (chunk.sequence.uncomputed == 0)
        policy.observe(step, step.prompt_tokens * token_s)
    assert [sequence.computed for sequence in sequences] == lengths


def scoring(run: int, tokens: int) -> Sequence:
    return Sequence(spec(run, [1] * tokens, prompt_logprobs=1), 0, [1] * tokens, (), arrival=run, then_decode=True)


def test_a_step_scores_few_tokens_whoever_asks_and_computes_others_beside() -> None:
    policy = measured(scheduler(max_tokens=256), 1000, 0.5)
    step = policy.plan([scoring(1, SCORED + 9), scoring(2, 50), waiting(3, 60)])
    assert shape(step) == [(1, 0, SCORED, False), (3, 0, 60, True)]
    step = policy.plan([scoring(1, 9), scoring(2, 50)])
    assert shape(step) == [(1, 0, 9, True), (2, 0, SCORED - 9, False)]


def test_which_rows_are_scored() -> None:
    """The last token of the prompt has none of the prompt after it; what was generated is not scored."""
    sequence = scoring(1, 10)
    sequence.ids += [7, 8]
    for start, count, scored in ((0, 4, 4), (4, 5, 5), (4, 6, 5), (9, 1, 0), (8, 4, 1), (11, 1, 0)):
        chunk = Chunk(sequence, start, count, samples=start + count == 12)
        assert chunk.scored == scored
        assert chunk.logit_rows == (*range(scored), *([count - 1] if chunk.samples else []))
    assert Chunk(waiting(2, 9), 0, 9, samples=True).logit_rows == (8,)


def test_the_victim_is_the_last_of_the_lowest_tier() -> None:
    tiers = [Tier.FREE, Tier.PAID, Tier.FREE, Tier.ENTERPRISE]
    sequences = [decoding(run, tier=tier) for run, tier in enumerate(tiers)]
    assert choose_victim(sequences).run == 2
    assert choose_victim([sequences[0], sequences[1], sequences[3]]).run == 0
    assert choose_victim([sequences[3], sequences[1]]).run == 1
