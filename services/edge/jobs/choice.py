"""The tokens of one choice, in order, whoever sent them.

Owns: what is known of one choice. Must not know: runs, hops, time. Invariant: `tokens` has no hole; a token once taken is never
replaced, so that the client is told nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.reply import FinishReason, Logprob


class ChoiceTokens:
    """`known` is one past the highest index that is known to exist; the difference to `tokens` is lost on the way.

    `logprobs`: one a token, or none at all.
    """

    __slots__ = ("finish", "known", "logprobs", "read", "reported", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.finish: FinishReason | None = None
        self.known = 0
        self.read = 0
        self.reported = False

    @classmethod
    def kept(cls, tokens: list[int], logprobs: list[Logprob], finish: FinishReason | None) -> ChoiceTokens:
        """What an earlier edge received of it."""
        choice = cls()
        choice.tokens, choice.logprobs, choice.finish, choice.known = tokens, logprobs, finish, len(tokens)
        return choice

    def take(self, index: int, tokens: Sequence[int], finish: FinishReason | None, logprobs: Sequence[Logprob] = ()) -> bool:
        """Tokens `index`, `index`+1, …; what is here already is dropped, what would leave a hole too. False: a hole."""
        if self.finish is not None:
            return True
        have = len(self.tokens)
        end = index + len(tokens)
        if end > self.known:
            self.known = end
        if index > have:
            return False
        if end > have:
            self.tokens.extend(tokens[have - index :] if index < have else tokens)
            if logprobs:
                self.logprobs.extend(logprobs[have - index :])
        if finish is not None and end == len(self.tokens):
            self.finish = finish
        return True

    def hear_of(self, end: int) -> None:
        """Tokens before `end` exist; they cannot be taken now."""
        self.known = max(self.known, end)

    def stop(self) -> None:
        """Nobody wants more of it: it is finished, whatever its owner does."""
        self.finish, self.reported = FinishReason.STOP, True
        self.read = len(self.tokens)

    @property
    def behind(self) -> bool:
        return self.finish is None and self.known > len(self.tokens)

    def forget_unseen(self) -> None:
        """A new attempt computes again what was lost."""
        self.known = len(self.tokens)

    def unread(self) -> tuple[list[int], FinishReason | None, list[Logprob]] | None:
        """New tokens, the finish once, and the tokens' log-probabilities; None when there is nothing new."""
        finish = None if self.reported else self.finish
        if self.read == len(self.tokens) and finish is None:
            return None
        news, logprobs = self.tokens[self.read :], self.logprobs[self.read :]
        self.read += len(news)
        self.reported = finish is not None or self.reported
        return news, finish, logprobs
