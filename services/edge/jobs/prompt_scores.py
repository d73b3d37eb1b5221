"""How likely a job's own prompt is, token by token, as far as workers have said; what a job that did not ask for it never lacks.

Owns: what is known of the prompt. Must not know: runs, hops, time. Invariant: `logprobs` has no hole; what was once taken is
never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.reply import Logprob


class PromptScores:
    """`logprobs`: of the prompt's tokens 1, 2, …; `wanted` of them in all; `known` to exist is what lies before that."""

    __slots__ = ("known", "logprobs", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.known = 1
        self.logprobs: list[Logprob] = []

    @classmethod
    def of(cls, prompt_tokens: int, alternatives: int | None) -> PromptScores:
        """For a prompt of so many tokens, the first of which has nothing before it."""
        return cls(0 if alternatives is None else prompt_tokens - 1)

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == self.wanted

    @property
    def next(self) -> int:
        """The first token that is missing."""
        return 1 + len(self.logprobs)

    @property
    def behind(self) -> bool:
        return not self.complete and self.known > self.next

    def forget_unseen(self) -> None:
        """A new attempt computes again what was lost."""
        self.known = self.next

    def take(self, index: int, logprobs: Sequence[Logprob]) -> bool:
        """Of the tokens from `index` on; what is here already is dropped, and what is not of the prompt. False: a hole."""
        self.known = max(self.known, index + len(logprobs))
        if index > self.next:
            return False
        self.logprobs += logprobs[self.next - index :][: self.wanted - len(self.logprobs)]
        return True
