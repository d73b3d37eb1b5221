"""The tokens of one choice, whatever order and loss its records suffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.reply import FinishReason
from services.edge.jobs.choice import ChoiceTokens

TOKENS = list(range(100, 120))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_any_records_then_a_replay(spans: list[tuple[int, int]]) -> None:
    """Records lost, doubled, overlapping and out of order leave a true beginning; a replay from there completes it."""
    choice = ChoiceTokens()
    for start, end in spans:
        known = TOKENS[start:end]
        taken = choice.take(start, known, FinishReason.STOP if known and end == len(TOKENS) else None)
        assert choice.tokens == TOKENS[: len(choice.tokens)]
        assert taken == (start <= len(choice.tokens))
        assert choice.finish is None or choice.tokens == TOKENS
    assert choice.behind == (choice.known > len(choice.tokens))
    missing = len(choice.tokens)
    assert choice.take(missing, TOKENS[missing:], FinishReason.STOP)
    assert choice.tokens == TOKENS
    assert choice.finish is FinishReason.STOP
    assert not choice.behind


@given(st.lists(st.integers(1, 5), max_size=8))
def test_everything_is_read_once(bundles: list[int]) -> None:
    choice = ChoiceTokens()
    read: list[int] = []
    for size in bundles:
        start = len(choice.tokens)
        choice.take(start, list(range(start, start + size)), None)
        news = choice.unread()
        assert news is not None
        read += news[0]
        assert choice.unread() is None
    choice.take(len(choice.tokens), (), FinishReason.LENGTH)
    assert choice.unread() == ([], FinishReason.LENGTH, [])
    assert choice.unread() is None
    assert read == choice.tokens
