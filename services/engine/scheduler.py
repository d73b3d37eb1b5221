"""Which tokens the next step computes: a policy, `plan`, over the sequences an engine holds.

Decode rows come first, one token each; what is left of the step's token budget goes to prompts in order of arrival, cut into
chunks (chunked prefill, Sarathi-Serve, arXiv 2403.02310). The budget is a time: a step should take `target_s`, so that a
cancel or a new arrival waits for one step at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens `start`..`start+count-1` of a sequence; `samples`: the last one yields the next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks if not chunk.sequence.decoding)


class Scheduler(Protocol):
    def plan(self, sequences: Iterable[Sequence]) -> Step | None:
        """The next step, or None when nothing can run. `sequences` come in order of arrival."""

    def observe(self, step: Step, seconds: float) -> None:
        """Learns what `step` cost."""

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens that one step takes now."""


class ChunkedScheduler:
    """At most `max_batch` decode rows and `max_tokens` prompt tokens a step, fewer when those take longer than `target_s`."""

    def __init__(self, *, max_batch: int, max_tokens: int, target_s: float = 0.06, chunk_tokens: int = 16) -> None:
        self._max_batch = max_batch
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._chunk_tokens = chunk_tokens
        self._token_s = 0.0

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens of one step at the measured rate, a multiple of the smallest chunk."""
        if self._token_s == 0.0:
            return min(self._max_tokens, 4 * self._chunk_tokens)
        fitting = int(self._target_s / self._token_s)
        return max(self._chunk_tokens, min(self._max_tokens, fitting) // self._chunk_tokens * self._chunk_tokens)

    def plan(self, sequences: Iterable[Sequence]) -> Step | None:
        decode: list[Chunk] = []
        prefill: list[Chunk] = []
        budget = self.prompt_budget
        for sequence in sequences:
            if sequence.decoding:
                if len(decode) < self._max_batch:
                    decode.append(Chunk(sequence, sequence.computed, 1, samples=True))
            elif budget > 0:
                count = min(sequence.uncomputed, budget)
                prefill.append(Chunk(sequence, sequence.computed, count, samples=count == sequence.uncomputed))
                budget -= count
        chunks = (*decode, *prefill)
        return Step(chunks) if chunks else None

    def observe(self, step: Step, seconds: float) -> None:
        tokens = step.prompt_tokens
        if tokens and tokens == sum(chunk.count for chunk in step.chunks):
            cost = seconds / tokens
            self._token_s = cost if self._token_s == 0.0 else 0.7 * self._token_s + 0.3 * cost
