"""All that was received of one job: the tokens of its choices, and what was said of its prompt.

Owns: what is here, and what is known to exist and is not. Must not know: runs, hops, time. Invariant: nothing is taken before
everything that comes before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.control import Position
from schemas.reply import PROMPT, Frame
from services.edge.jobs.choice import ChoiceTokens
from services.edge.jobs.draft import Delta, Draft
from services.edge.jobs.prompt_scores import PromptScores


class JobTokens:
    def __init__(self, draft: Draft) -> None:
        self.choices = [ChoiceTokens() for _ in range(draft.n)]
        self.prompt = PromptScores.of(draft.prompt_tokens, draft.sampling.prompt_logprobs)
        self.stopped: set[int] = set()
        """Choices that the client needs no more of; their owner may not have heard yet."""
        self.final = False
        """The owner said FINISHED: every choice has its finish, here or in the owner's replay ring."""
        self.ended = False
        """A digest said that the run has ended; the event that says how was lost."""

    def next_attempt(self) -> None:
        """It computes again what was lost."""
        self.final = self.ended = False
        self.prompt.forget_unseen()
        for choice in self.choices:
            choice.forget_unseen()

    def take(self, frame: Frame) -> bool:
        """False when something before this frame is missing: tokens, or what was said of the prompt.

        A choice that the job has not is none of ours: ignored.
        """
        if frame.choice == PROMPT:
            return self.prompt.take(frame.index, frame.logprobs)
        if not 0 <= frame.choice < len(self.choices):
            return True
        if self.prompt.wanted and not self.prompt.complete:
            self.choices[frame.choice].hear_of(frame.index + len(frame.tokens))
            return False
        return self.choices[frame.choice].take(frame.index, frame.tokens, frame.finish, frame.logprobs)

    def expect(self, last: Iterable[tuple[int, int]]) -> None:
        """The owner has sent tokens up to these (choice, index)."""
        for index, token in last:
            if 0 <= index < len(self.choices):
                self.choices[index].hear_of(token + 1)

    def stop(self, choice: int) -> None:
        """The client needs no more of this choice; the others go on."""
        self.choices[choice].stop()
        self.stopped.add(choice)

    @property
    def complete(self) -> bool:
        """Every choice has finished."""
        for choice in self.choices:  # noqa: SIM110 - looked at for every token, and `all` costs three times as much
            if choice.finish is None:
                return False
        return True

    @property
    def wanting(self) -> bool:
        """The owner has said something that is not here."""
        return self.ended or self.prompt.behind or any(map(self._lacks, self.choices))

    def missing(self) -> tuple[Position, ...]:
        """From where the owner has to repeat itself; of the prompt who computed it, which may have been somebody before."""
        prompt = () if self.prompt.complete else (Position(choice=PROMPT, index=self.prompt.next),)
        return prompt + tuple(
            Position(choice=index, index=len(choice.tokens)) for index, choice in enumerate(self.choices) if self._lacks(choice)
        )

    def unfinished(self) -> tuple[Position, ...]:
        """Where each choice that has not finished goes on."""
        return tuple(
            Position(choice=index, index=len(choice.tokens)) for index, choice in enumerate(self.choices) if choice.finish is None
        )

    def received(self) -> int:
        """Tokens, of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def progress(self) -> int:
        """Grows with everything that is received."""
        return self.received() + len(self.prompt.logprobs)

    def unread(self) -> list[Delta]:
        """What the client has not been handed out yet."""
        found = []
        for index, choice in enumerate(self.choices):
            news = choice.unread()
            if news is not None:
                found.append(Delta(index, *news))
        return found

    def _lacks(self, choice: ChoiceTokens) -> bool:
        return choice.behind or (self.final and choice.finish is None)
