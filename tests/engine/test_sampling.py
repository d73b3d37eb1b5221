"""What a token depends on, what the filters keep, and that the draws follow the distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from schemas.job import Sampling
from services.engine.history import History
from services.engine.runner import Failed, Sampled
from services.engine.sampling import Draw, sample, uniform

Logits = NDArray[np.float32]
seeds = st.integers(0, 2**64 - 1)
counters = st.integers(0, 2**40)
rows_of_logits = st.lists(st.integers(-40, 40), min_size=1, max_size=60)  # few values, so that there are ties
filters = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 2.0),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(0, 70),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from((0.5, 1.0, 1.3, 2.0)),
        "presence_penalty": st.sampled_from((-2.0, 0.0, 0.5, 2.0)),
        "frequency_penalty": st.sampled_from((-1.0, 0.0, 0.25, 2.0)),
        "logit_bias": st.dictionaries(st.integers(0, 19), st.sampled_from((-100.0, -1.0, 0.5, 100.0)), max_size=4),
    }
)
token_ids = st.lists(st.integers(0, 19), max_size=40)


def draw(
    *,
    choice: int = 0,
    index: int = 0,
    banned: tuple[int, ...] = (),
    seed: int = 7,
    history: History | None = None,
    **sampling: Any,
) -> Draw:
    return Draw(Sampling(seed=seed, max_tokens=1, **sampling), choice, index, banned, history)


def one(row: Logits, which: Draw) -> Sampled:
    (drawn,) = sample(row[None], [which])
    assert isinstance(drawn, Sampled)
    return drawn


def logits_of(values: list[int]) -> Logits:
    return np.array(values, np.float32) / 4


def by_the_book(row: Logits, which: Draw) -> int:
    """The definition, one line a rule, over the whole sorted vocabulary."""
    sampling = which.sampling
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    nats = [(float(row[token]) - float(row.max())) / sampling.temperature for token in order]
    if sampling.min_p > 0:
        nats = [value for value in nats if value >= math.log(sampling.min_p)]
    if sampling.top_k > 0:
        nats = nats[: sampling.top_k]
    mass = np.cumsum(np.exp(nats))
    if sampling.top_p < 1.0:
        mass = mass[: int(np.argmax(mass >= sampling.top_p * mass[-1])) + 1]
    point = uniform(sampling.seed, which.choice, which.index) * mass[-1]
    return order[int(np.argmax(mass > point))]


@given(rows_of_logits, seeds, counters, filters)
def test_a_draw_is_what_the_definition_says(values: list[int], seed: int, index: int, kept: dict[str, Any]) -> None:
    which = draw(seed=seed, index=index, **kept)
    assert one(logits_of(values), which).token == by_the_book(logits_of(values), which)


@given(st.lists(st.tuples(seeds, counters, filters), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_batch_mates_do_not_matter(requests: list[tuple[int, int, dict[str, Any]]], weather: int) -> None:
    rows = np.random.default_rng(weather).normal(0, 4, (len(requests), 50)).astype(np.float32)
    draws = [draw(seed=seed, index=index, **kept) for seed, index, kept in requests]
    together = sample(rows, draws)
    assert together == [one(row, which) for row, which in zip(rows, draws, strict=True)]
    assert together == sample(rows[::-1], draws[::-1])[::-1]


@given(rows_of_logits, seeds)
def test_greedy_is_the_best_token_and_the_lowest_id_of_equals(values: list[int], seed: int) -> None:
    assert one(logits_of(values), draw(seed=seed, temperature=0.0)).token == values.index(max(values))


@given(rows_of_logits, seeds)
def test_a_temperature_near_zero_draws_a_best_token(values: list[int], seed: int) -> None:
    assert values[one(logits_of(values), draw(seed=seed, temperature=1e-300)).token] == max(values)


@given(seeds, counters)
def test_top_p_keeps_the_smallest_set_with_that_mass(seed: int, index: int) -> None:
    row = np.log(np.array([0.05, 0.4, 0.3, 0.15, 0.1], np.float32))
    assert one(row, draw(seed=seed, index=index, top_p=0.6)).token in {1, 2}
    assert one(row, draw(seed=seed, index=index, top_p=0.8)).token in {1, 2, 3}


def test_seed_choice_and_index_each_change_the_number() -> None:
    numbers = {uniform(seed, choice, index) for seed in range(10) for choice in range(10) for index in range(10)}
    assert len(numbers) == 1000
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_number_of_a_token_is_the_same_in_every_release() -> None:
    assert uniform(42, 1, 3) == 0.35488200213290455


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-square, 19 degrees of freedom: 43.8 is its 0.1 % point; the seeds are fixed, so this cannot flicker."""
    row = np.linspace(-2, 2, 20, dtype=np.float32)
    weights = np.exp(row.astype(np.float64) / temperature)
    count = 20_000
    tokens = [one(row, draw(index=index, temperature=temperature)).token for index in range(count)]
    expected = weights / weights.sum() * count
    assert ((np.bincount(tokens, minlength=20) - expected) ** 2 / expected).sum() < 43.8


def test_a_flat_vocabulary_is_drawn_to_its_last_token() -> None:
    """Far more tokens than the first look holds, all equal: order is by id, so the number is the position."""
    row = np.zeros(50_000, np.float32)
    for index in range(50):
        assert one(row, draw(index=index)).token == int(uniform(7, 0, index) * 50_000)


def test_a_heavy_tail_is_reached() -> None:
    """One token has as much mass as 49,999 that lie 10.8 nats lower, beyond the first look."""
    row = np.full(50_000, -math.log(49_999.0), np.float32)
    row[123] = 0.0
    tokens = [one(row, draw(index=index)).token for index in range(200)]
    assert 70 < tokens.count(123) < 130
    assert len(set(tokens)) > 70


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = np.zeros((3, 40), np.float32)
    rows[1, 17] = bad
    good, failed, other = sample(rows, [draw(), draw(temperature=0.0), draw(index=1)])
    assert isinstance(failed, Failed)
    assert good == one(rows[0], draw())
    assert other == one(rows[2], draw(index=1))


@given(rows_of_logits, seeds, filters)
def test_a_banned_token_is_never_drawn(values: list[int], seed: int, kept: dict[str, Any]) -> None:
    row = logits_of([*values, 0])
    best = int(row.argmax())
    assert one(row, draw(seed=seed, banned=(best,), **kept)).token != best
    assert one(row, draw(seed=seed, banned=(best,), temperature=0.0)).token != best


def test_logprobs_are_the_models_own_before_temperature_and_filters() -> None:
    probabilities = [0.1, 0.2, 0.4, 0.3]
    row = np.log(np.array(probabilities, np.float32))
    logprob = one(row, draw(logprobs=2, temperature=0.0, top_k=1)).logprob
    assert logprob is not None
    assert logprob.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in logprob.top] == [2, 3]
    assert [math.exp(value) for _, value in logprob.top] == pytest.approx([0.4, 0.3], abs=1e-6)


def test_no_alternatives_are_given_unless_asked_for() -> None:
    row = np.zeros(8, np.float32)
    assert one(row, draw()).logprob is None
    chosen = one(row, draw(logprobs=0)).logprob
    assert chosen is not None
    assert chosen.top == ()


def test_nothing_to_draw() -> None:
    assert sample(np.zeros((0, 40), np.float32), []) == []


# penalties and biases


def history(prompt: list[int], generated: list[int]) -> History:
    seen = History(prompt)
    for cut in range(0, len(generated), 3):  # as steps and attempts bring them
        seen.extend(generated[cut : cut + 3])
    return seen


def changed_by_the_book(row: Logits, sampling: Sampling, prompt: list[int], generated: list[int]) -> Logits:
    """Token by token, as the definitions read."""
    changed = row.copy()
    for token in range(len(row)):
        if token in prompt or token in generated:
            factor = np.float32(sampling.repetition_penalty)
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        count = generated.count(token)
        changed[token] -= np.float32(sampling.frequency_penalty) * np.float32(count)
        changed[token] -= np.float32(sampling.presence_penalty) if count else np.float32(0)
        changed[token] += np.float32(sampling.logit_bias.get(token, 0.0))
    return changed


@given(st.integers(0, 2**32 - 1), token_ids, token_ids, penalties, filters, seeds)
def test_penalties_are_what_the_definitions_say(
    weather: int, prompt: list[int], generated: list[int], asked: dict[str, Any], kept: dict[str, Any], seed: int
) -> None:
    row = np.random.default_rng(weather).normal(0, 4, 20).astype(np.float32)
    before = row.copy()
    for how in (kept, {"temperature": 0.0}):
        which = draw(seed=seed, index=len(generated), history=history(prompt, generated), logprobs=3, **asked, **how)
        plain = draw(seed=seed, index=len(generated), **how)
        changed = changed_by_the_book(row, which.sampling, prompt, generated)
        drawn = one(row, which)
        assert drawn.token == one(changed, plain).token
        assert drawn.logprob == one(row, draw(logprobs=3, temperature=0.0, logit_bias={drawn.token: 100.0})).logprob, (
            "the model's own"
        )
    assert np.array_equal(row, before), "the next draw from this row must find it as it was"


def test_a_penalty_tells_the_prompt_from_the_answer() -> None:
    row = np.array([3.0, 2.9, 0.0], np.float32)
    greedy = {"temperature": 0.0}
    assert one(row, draw(history=history([0], []), presence_penalty=1.0, **greedy)).token == 0
    assert one(row, draw(history=history([0], []), frequency_penalty=1.0, **greedy)).token == 0
    assert one(row, draw(history=history([0], []), repetition_penalty=2.0, **greedy)).token == 1
    assert one(row, draw(history=history([], [0]), presence_penalty=1.0, **greedy)).token == 1


def test_no_bias_brings_back_what_may_not_be_drawn() -> None:
    row = np.array([5.0, 1.0, 0.0], np.float32)
    assert one(row, draw(banned=(0,), logit_bias={0: 100.0}, temperature=0.0)).token == 1
    assert one(row, draw(logit_bias={2: 100.0}, temperature=0.0)).token == 2


@pytest.mark.parametrize("kept", [{}, {"temperature": 0.0}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.5}])
def test_a_row_of_which_nothing_may_be_drawn_fails_alone(kept: dict[str, Any]) -> None:
    failed, good = sample(np.zeros((2, 5), np.float32), [draw(banned=tuple(range(5)), **kept), draw(banned=(0, 1, 2, 3), **kept)])
    assert isinstance(failed, Failed)
    assert isinstance(good, Sampled)
    assert good.token == 4


@pytest.mark.parametrize(
    ("kept", "drawn"),
    [
        ({"top_k": 2**31}, {0, 1, 2, 3}),
        ({"min_p": 5e-324}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"temperature": 5e-324}, {1, 3}),
        ({"top_p": 5e-324}, {1}),
    ],
)
def test_limits_beyond_any_use(kept: dict[str, Any], drawn: set[int]) -> None:
    row = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert {one(row, draw(index=index, **kept)).token for index in range(200)} == drawn


def test_a_vocabulary_smaller_than_the_alternatives_asked_for() -> None:
    logprob = one(np.zeros(5, np.float32), draw(logprobs=20)).logprob
    assert logprob is not None
    assert [token for token, _ in logprob.top] == [0, 1, 2, 3, 4]
    assert sum(math.exp(value) for _, value in logprob.top) == pytest.approx(1.0)
