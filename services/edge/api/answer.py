"""The text of one job as it comes, the same for streams and for whole answers.

Owns: one text stream a choice, the count of tokens, the finish of each choice. Invariants: the joined text does not depend on how
tokens were bundled; a choice finishes once; tokens count when they were generated, also those of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.reply import FinishReason
from services.edge.api.ports import Handle, Text
from services.edge.jobs.draft import Delta


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice's client may see now. `text` may be empty when `finish` is set."""

    choice: int
    text: str
    finish: FinishReason | None = None


class Answer:
    """`token_by_token`: stop strings are looked for after each token, so that nothing after one is counted."""

    def __init__(self, handle: Handle, texts: Sequence[Text], *, prompt_tokens: int, token_by_token: bool) -> None:
        self._handle = handle
        self._texts = texts
        self._open = set(range(len(texts)))
        self._one_at_a_time = token_by_token
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0

    @property
    def id(self) -> str:
        return self._handle.id

    @property
    def cached_tokens(self) -> int:
        return self._handle.cached_tokens

    @property
    def done(self) -> bool:
        return not self._open

    async def admitted(self) -> None:
        """Raises the `HeadraceError` that refused the job."""
        await self._handle.admitted()

    async def next(self, timeout: float) -> list[Piece] | None:
        """New pieces, perhaps none (an unfinished character); None after `timeout` seconds of silence."""
        deltas = await self._handle.next(timeout)
        pieces = [piece for delta in deltas if (piece := self._piece(delta)) is not None]
        if self.done:
            self._handle.cancel()  # nothing to do unless a stop string ended it
        return pieces if deltas else None

    def cancel(self) -> None:
        """The client is gone."""
        self._handle.cancel()

    def _piece(self, delta: Delta) -> Piece | None:
        if delta.choice not in self._open:
            return None
        text, stopped = self._push(self._texts[delta.choice], delta.tokens)
        if stopped:
            self._open.discard(delta.choice)
            return Piece(delta.choice, text, FinishReason.STOP)
        if delta.finish is not None:
            self._open.discard(delta.choice)
            return Piece(delta.choice, text + self._texts[delta.choice].finish(), delta.finish)
        return Piece(delta.choice, text) if text else None

    def _push(self, stream: Text, tokens: Sequence[int]) -> tuple[str, bool]:
        if not self._one_at_a_time:
            self.completion_tokens += len(tokens)
            return stream.push(tokens).text, False
        text = ""
        for token in tokens:
            self.completion_tokens += 1
            delta = stream.push((token,))
            text += delta.text
            if delta.stopped:
                return text, True
        return text, False
