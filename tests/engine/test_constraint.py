"""A choice's place in its grammar, and draws that keep to it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from schemas.job import Grammar, Sampling
from services.engine.constraint import Constraint
from services.engine.runner import Failed, Sampled
from services.engine.sampling import Draw, sample
from services.text.grammar import CompiledGrammar, compile_grammar, model_vocabulary
from tests.text.tiny import CONFIG, END, byte_ids, tiny_tokenizer, tiny_tokenizer_json

VOCAB = CONFIG["vocab_size"] + 5  # as models pad theirs: rows longer than the tokenizer


@cache
def grammar(source: str, kind: str = "regex") -> CompiledGrammar:
    vocabulary = model_vocabulary(tiny_tokenizer_json(), VOCAB, frozenset({END}))
    compiled = compile_grammar(Grammar(kind=kind, source=source), vocabulary)
    assert isinstance(compiled, CompiledGrammar), compiled
    return compiled


def after(which: CompiledGrammar, ids: list[int]) -> Constraint:
    constraint = Constraint(which)
    constraint.extend(ids)
    return constraint


def allowed(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(constraint.allowed(VOCAB)).tolist())


def row(index: int, seed: int = 0) -> NDArray[np.float32]:
    made: NDArray[np.float32] = np.random.default_rng([seed, index]).normal(0, 3, VOCAB).astype(np.float32)
    return made


def draw(constraint: Constraint, index: int, *, banned: tuple[int, ...] = (), **sampling: Any) -> Sampled:
    settings = Sampling(**{"seed": 1, "max_tokens": 1} | sampling)
    (drawn,) = sample(row(index)[None], [Draw(settings, 0, index, banned, None, constraint)])
    assert isinstance(drawn, Sampled)
    return drawn


def answer(which: CompiledGrammar, generated: list[int], most: int, **sampling: Any) -> list[int]:
    """The ids of a choice that has `generated` so far, until it is complete or has `most` of them."""
    constraint, ids = after(which, generated), list(generated)
    while len(ids) < most:
        drawn = draw(constraint, len(ids), **sampling)
        ids.append(drawn.token)
        if drawn.complete:
            break
    return ids


def test_the_end_is_allowed_exactly_where_the_text_may_end() -> None:
    which = grammar("a{2,3}")
    ids = byte_ids("aaa")
    assert [END in allowed(after(which, ids[:count])) for count in range(4)] == [False, False, True, True]
    assert allowed(after(which, ids[:1])) == {ids[0]}
    assert allowed(after(which, ids)) == {END}


def test_a_token_of_several_bytes_counts_when_all_of_them_fit() -> None:
    tokens = tiny_tokenizer().encode("hello")
    assert len(tokens) == 1
    assert tokens[0] in allowed(after(grammar("(hello|h)!"), []))
    assert tokens[0] not in allowed(after(grammar("hell!"), []))


def test_ids_outside_the_tokenizer_are_never_allowed() -> None:
    assert max(allowed(after(grammar(r"(?s:.*)"), []))) < CONFIG["vocab_size"]


def test_complete_when_nothing_may_follow_or_the_end_was_drawn() -> None:
    which = grammar("ab?")
    a, b = byte_ids("ab")
    first = Constraint(which)
    assert not first.take(a)
    assert first.take(b)
    second = after(which, [a])
    assert second.take(END)
    assert (first.length, second.length) == (2, 2)


def test_a_complete_choice_that_comes_again_ends_with_its_next_token() -> None:
    """The frame that ended it was lost with its worker."""
    drawn = draw(after(grammar("ab"), byte_ids("ab")), 2)
    assert (drawn.token, drawn.complete) == (END, True)


def test_what_is_banned_yields_to_the_grammar_only_where_nothing_else_is_left() -> None:
    which = grammar("ab?")
    (a, b) = byte_ids("ab")
    assert draw(after(which, [a]), 1, banned=(END,)).token == b
    assert draw(after(which, [a, b]), 2, banned=(END,)).token == END


def test_a_broken_place_fails_its_own_row_only() -> None:
    good, bad = after(grammar("a+"), byte_ids("a")), after(grammar("a+"), byte_ids("x"))
    settings = Sampling(seed=1, max_tokens=1)
    draws = [Draw(settings, 0, 1, (), None, bad), Draw(settings, 0, 1, (), None, good), Draw(settings, 0, 1)]
    broken, *others = sample(np.stack([row(0), row(1), row(2)]), draws)
    assert isinstance(broken, Failed)
    assert broken.code == "invalid_value"
    assert all(isinstance(other, Sampled) for other in others)


def test_log_probabilities_are_the_models_own_and_finite() -> None:
    """Case 30: also of tokens that the grammar forbids."""
    constrained = draw(after(grammar("a+"), []), 0, logprobs=5)
    free = sample(row(0)[None], [Draw(Sampling(seed=1, max_tokens=1, logprobs=5), 0, 0)])[0]
    assert isinstance(free, Sampled)
    assert constrained.logprob is not None
    assert free.logprob is not None
    assert constrained.logprob.top == free.logprob.top
    assert np.isfinite(constrained.logprob.logprob)


FLAG = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
            "deep": FLAG,
        },
        "required": ["name", "tags", "deep"],
        "additionalProperties": False,
    }
)


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.4},
    {"min_p": 0.3},
    {"logit_bias": {END: 100.0}},
)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**63),
    cut=st.integers(0, 200),
    filters=st.sampled_from(FILTERS),
)
def test_a_choice_cut_anywhere_goes_on_as_one_that_was_not(seed: int, cut: int, filters: dict[str, Any]) -> None:
    which = grammar(OBJECT, "json_schema")
    whole = answer(which, [], 200, seed=seed, **filters)
    assert answer(which, whole[: min(cut, len(whole) - 1)], 200, seed=seed, **filters) == whole
    if len(whole) < 200:
        text = tiny_tokenizer().decode(whole)
        assert json.loads(text).keys() == {"name", "tags", "deep"}
