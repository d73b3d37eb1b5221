"""What an edge knows of a prompt's log-probabilities: in order, each once, and when something is missing."""

from __future__ import annotations

from schemas.reply import Logprob
from services.edge.jobs.prompt_scores import PromptScores


def of(first: int, end: int, value: float = -1.0) -> list[Logprob]:
    return [Logprob(token=token, logprob=value) for token in range(first, end)]


def test_nothing_is_missing_where_nothing_was_asked() -> None:
    assert PromptScores.of(9, None).complete
    assert PromptScores.of(1, 3).complete
    assert not PromptScores.of(2, 0).complete


def test_in_order() -> None:
    scores = PromptScores.of(8, 0)
    assert scores.take(1, of(1, 4))
    assert (scores.next, scores.complete, scores.behind) == (4, False, False)
    assert scores.take(4, of(4, 8))
    assert (scores.complete, scores.behind) == (True, False)
    assert [one.token for one in scores.logprobs] == list(range(1, 8))


def test_what_is_here_stays_and_what_is_too_much_is_dropped() -> None:
    scores = PromptScores.of(5, 0)
    scores.take(1, of(1, 3))
    assert scores.take(1, of(1, 9, value=-7.0))
    assert [(one.token, one.logprob) for one in scores.logprobs] == [(1, -1.0), (2, -1.0), (3, -7.0), (4, -7.0)]
    assert scores.take(1, of(1, 3))
    assert scores.complete


def test_a_hole_is_known_until_it_is_filled_or_a_new_attempt_begins() -> None:
    scores = PromptScores.of(9, 0)
    assert not scores.take(4, of(4, 6))
    assert scores.behind
    assert scores.logprobs == []
    assert scores.take(1, of(1, 6))
    assert not scores.behind
    assert not scores.take(7, of(7, 9))
    scores.forget_unseen()
    assert not scores.behind
    assert scores.next == 6
