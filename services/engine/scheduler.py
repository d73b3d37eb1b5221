"""Which tokens the next step computes: a policy, `plan`, over the sequences an engine holds.

Decode rows come first, one token each; what is left of the step's token budget goes to prompts in order of their turns, cut into
chunks (chunked prefill, Sarathi-Serve, arXiv 2403.02310). The budget is a time: a step should take `target_s`, so that a
cancel or a new arrival waits for one step at most. Turns are in order of arrival, but an enterprise prompt comes before others
that came up to `AHEAD_S` before it, also when they are half computed: those wait, with what they have, and never for long. And
while a long prompt has its turn, most of each step goes to much shorter ones behind it: it delays them by the step in progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from schemas.job import Tier
from services.engine.sequence import Sequence


class Chunk(msgspec.Struct, frozen=True):
    """Compute tokens `start`..`start+count-1` of a sequence; `samples`: the last one yields the next token, or several.

    The last of them may be a `draft`, a guess at what comes after the sequence's own ids: then each of these, and the token
    before them, yields the one that really comes next. A struct: it is made for each row of each step.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def ids(self) -> list[int]:
        """What it computes, [count]."""
        return self.sequence.ids[self.start : self.end - len(self.draft)] + list(self.draft)

    @property
    def scored(self) -> int:
        """How many of its first rows say how likely the prompt's token after each is."""
        if self.sequence.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, self.sequence.prompt_length - 1) - self.start)

    @property
    def logit_rows(self) -> tuple[int, ...]:
        """Which of its rows yield logits: those that are scored, then those that are drawn from."""
        drawn = range(self.count - 1 - len(self.draft), self.count) if self.samples else ()
        return (*range(self.scored), *drawn)


@dataclass(frozen=True, slots=True)
class Step:
    """`prompt_tokens`: how many of its tokens are a prompt's."""

    chunks: tuple[Chunk, ...]
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        prompts = sum([chunk.count for chunk in self.chunks if not chunk.sequence.decoding])
        object.__setattr__(self, "prompt_tokens", prompts)


AHEAD_S = 5.0
"""How much later than another prompt an enterprise one may come and be computed before it."""
SCORED = 32
"""Prompt tokens that one step scores: each costs a row of logits over the whole vocabulary, in memory and in time."""
_OWN = 4
"""A long prompt that has its turn keeps this part of each step, whatever shorter ones come: a quarter."""
_KEEP = 0.9
"""How much of the past each new step leaves in the measured rate. Steps count by their tokens, so short ones say little."""


class Scheduler(Protocol):
    def plan(self, sequences: Iterable[Sequence]) -> Step | None:
        """The next step, or None when nothing can run. `sequences` come in order of arrival."""

    def observe(self, step: Step, seconds: float) -> None:
        """Learns what `step` cost."""

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens that are worth queueing: those of one step, or the fewest that are read for alone."""


class ChunkedScheduler:
    """At most `max_batch` decode rows and `max_tokens` prompt tokens a step, fewer when those take longer than `target_s`.

    However slow the machine, prompts get `chunk_tokens` a step: smaller ones would read all weights for little. Before
    anything is measured they get that beside decode rows, and `alone_tokens` in a step of their own, which nobody's next token
    waits for.
    """

    def __init__(
        self, *, max_batch: int, max_tokens: int, target_s: float = 0.06, chunk_tokens: int = 16, alone_tokens: int = 64
    ) -> None:
        self._max_batch = max_batch
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._chunk_tokens = min(chunk_tokens, max_tokens)
        self._alone_tokens = min(alone_tokens, max_tokens)
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens of one step that decodes nothing, at the measured rate; what is worth queueing is never less than
        `alone_tokens`."""
        return max(self._alone_tokens, self._budget(decode_rows=0))

    def plan(self, sequences: Iterable[Sequence]) -> Step | None:
        decode, prompts = list[Sequence](), list[Sequence]()
        for sequence in sequences:
            (decode if sequence.decoding else prompts).append(sequence)
        rows = [sequence for sequence in decode if sequence.computable][: self._max_batch]
        chunks = [Chunk(sequence, sequence.computed, 1, True) for sequence in rows]
        budget, scoring = self._budget(len(rows)), SCORED
        for sequence, share in shares(sorted(prompts, key=turn), budget):
            count = min(share, budget, scoring if sequence.scoring else budget)
            if count > 0:
                last = count == sequence.uncomputed
                chunks.append(Chunk(sequence, sequence.computed, count, samples=last and bool(sequence.drawing)))
                budget -= count
                scoring -= count if sequence.scoring else 0
        return Step(tuple(chunks)) if chunks else None

    def observe(self, step: Step, seconds: float) -> None:
        if step.prompt_tokens:  # a step that only decodes costs mostly its weights, whatever the rows
            self._tokens = _KEEP * self._tokens + sum(chunk.count for chunk in step.chunks)
            self._seconds = _KEEP * self._seconds + seconds

    def _budget(self, decode_rows: int) -> int:
        """Prompt tokens: what the target leaves beside the decode rows, within the limits."""
        if self._seconds == 0.0:
            return self._chunk_tokens if decode_rows else self._alone_tokens
        fitting = int(self._target_s * self._tokens / self._seconds) - decode_rows
        return max(self._chunk_tokens, min(self._max_tokens, fitting))  # not rounded: small steps would never grow again


_RANK = {Tier.ENTERPRISE: 0, Tier.PAID: 1, Tier.FREE: 2}


def turn(sequence: Sequence) -> float:
    """Prompts with a smaller one are computed first; equal ones in order of arrival."""
    return sequence.came_at if sequence.spec.tier is Tier.ENTERPRISE else sequence.came_at + AHEAD_S


def shares(in_turn: Seq[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
    """Who takes what of a step of `budget` prompt tokens, in order and at most; `in_turn` as `turn` says."""
    shorter, theirs = _much_shorter(in_turn, budget), budget - max(1, budget // _OWN)
    for sequence in shorter:
        share = min(sequence.computable, theirs)
        theirs -= share
        yield sequence, share
    for sequence in in_turn:
        if sequence not in shorter:
            yield sequence, sequence.computable


def _much_shorter(in_turn: Seq[Sequence], budget: int) -> list[Sequence]:
    """Those with at most half of what the first one has left, if that is more than a step; nobody is one to an enterprise prompt
    but others of its tier. Equal prompts are computed one after the other: in turns, all would be as late as the last."""
    first = next((sequence for sequence in in_turn if sequence.computable > 0), None)
    if first is None or first.computable <= budget:
        return []
    is_urgent = first.spec.tier is Tier.ENTERPRISE
    behind = [sequence for sequence in in_turn if sequence.spec.tier is Tier.ENTERPRISE or not is_urgent]
    return sorted((each for each in behind if 2 * each.uncomputed <= first.uncomputed), key=lambda each: each.uncomputed)


def makes_way(sequence: Sequence, now: float) -> bool:
    """Whether an enterprise prompt that comes `now` is computed before it."""
    return turn(sequence) > now


def precedence(sequence: Sequence) -> tuple[int, int]:
    """Smaller comes first: the highest tier, then the one that came first. Choices of a run are equal."""
    return _RANK[sequence.spec.tier], sequence.arrival


def choose_victim(sequences: Iterable[Sequence]) -> Sequence:
    """Who gives its blocks up when memory runs out: of the lowest tier, the one that came last."""
    return max(sequences, key=precedence)
