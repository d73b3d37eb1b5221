"""The text of one job as it comes, the same for streams and for whole answers.

Owns: one text stream a choice, the count of tokens, the finish of each choice. Invariants: the joined text does not depend on how
tokens were bundled; a choice finishes once; tokens count when they were generated, also those of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from schemas.errors import InternalError
from schemas.explanation import Explanation
from schemas.reply import FinishReason
from services.edge.api.logprobs import Entry, TokenLogprobs
from services.edge.api.ports import Handle, Text
from services.edge.api.prompt_logprobs import PromptWriter, WrittenPrompt
from services.edge.api.usage import Usage
from services.edge.jobs.draft import Delta


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What became known of one tool call: at first its id and name, then its arguments, JSON once joined."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Piece(msgspec.Struct, frozen=True):
    """What one choice's client may see now: `text`, which may be empty, then `calls`. `logprobs`: None when not asked for.

    `finish`: a `FinishReason`, or "tool_calls". `prompt`: with the first piece of a choice whose prompt is scored.
    One a token is made: a Struct, because a dataclass takes ten times as long.
    """

    choice: int
    text: str
    finish: str | None = None
    logprobs: list[Entry] | None = None
    calls: tuple[CallDelta, ...] = ()
    prompt: WrittenPrompt | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.logprobs or self.calls or self.finish or self.prompt)


class Calls(Protocol):
    """Looks for tool calls in one choice's text; see `services.edge.api.calls`."""

    def read(self, piece: Piece) -> list[Piece]: ...


class AnyAnswer(Protocol):
    """What an exchange reads: the answer to one prompt, or to several."""

    @property
    def id(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def done(self) -> bool: ...

    @property
    def explanation(self) -> Explanation | None: ...

    async def admitted(self) -> None: ...

    async def next(self, timeout: float) -> list[Piece] | None: ...

    def cancel(self) -> None: ...


class Answer:
    """`token_by_token`: stop strings, and the last call that is allowed, are looked for after each token, so that nothing after
    one is counted.

    `logprobs`, `calls`: one a choice, or none at all; the former need `token_by_token`. `price`: of a second of compute.
    """

    def __init__(
        self,
        handle: Handle,
        texts: Sequence[Text],
        *,
        prompt_tokens: int,
        token_by_token: bool,
        logprobs: Sequence[TokenLogprobs] = (),
        calls: Sequence[Calls] = (),
        prompt: PromptWriter | None = None,
        price: float | None = None,
    ) -> None:
        self._handle = handle
        self._price = price
        self._texts = texts
        self._logprobs = logprobs
        self._calls = calls
        self._prompt = prompt
        self._unread: list[Delta] = []
        self._open = set(range(len(texts)))
        self._silent = set(self._open)
        self._one_at_a_time = token_by_token
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    @property
    def id(self) -> str:
        return self._handle.id

    @property
    def usage(self) -> Usage:
        """A job that nobody began used nothing, not even its prompt."""
        handle, prompt = self._handle, self._prompt_tokens if self._handle.began else 0
        return Usage(prompt, self._completion_tokens, min(handle.cached_tokens, prompt), handle.compute_s, self._price)

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def explanation(self) -> Explanation | None:
        """As its handle's; known once it is admitted, or refused."""
        return self._handle.explanation

    async def admitted(self) -> None:
        """Raises the `HeadraceError` that refused the job."""
        await self._handle.admitted()

    async def next(self, timeout: float) -> list[Piece] | None:
        """New pieces, perhaps none (an unfinished character); None after `timeout` seconds of silence."""
        self._unread = self._unread or await self._handle.next(timeout)
        prompt = None
        if self._prompt is not None and self._unread:
            prompt = await self._prompt.write(self._handle.prompt_logprobs)  # cancelled here, the next call reads the same
        unread, self._unread = self._unread, []
        deltas = [one for delta in unread for one in delta.one_by_one()] if self._calls and self._one_at_a_time else unread
        pieces = []
        for delta in deltas:
            for piece in self._pieces(delta, prompt):
                pieces.append(piece)
                if piece.finish is not None:
                    self.stop(piece.choice)  # nothing to do unless a stop string ended it, or the last call that is allowed
        return pieces if unread else None

    def stop(self, choice: int) -> None:
        """Nothing more is wanted of this choice."""
        self._open.discard(choice)
        if self.done:
            self._handle.cancel()
        else:
            self._handle.stop(choice)

    def cancel(self) -> None:
        """The client is gone."""
        self._handle.cancel()

    def _pieces(self, delta: Delta, prompt: WrittenPrompt | None) -> Sequence[Piece]:
        piece = self._piece(delta, prompt)
        if piece is None:
            return ()
        return [each for each in self._calls[piece.choice].read(piece) if not each.empty] if self._calls else (piece,)

    def _piece(self, delta: Delta, prompt: WrittenPrompt | None) -> Piece | None:
        choice, stream = delta.choice, self._texts[delta.choice]
        if choice not in self._open:
            return None
        text, stopped = self._push(stream, delta)
        finish = FinishReason.STOP if stopped else delta.finish
        if finish is not None:
            self._open.discard(choice)
            text += "" if stopped else stream.finish()
        logprobs = self._released(choice, stopped, finish) if self._logprobs else None
        piece = Piece(choice, text, finish, logprobs, prompt=prompt if choice in self._silent else None)
        self._silent.discard(choice)
        return None if piece.empty else piece

    def _push(self, stream: Text, delta: Delta) -> tuple[str, bool]:
        """The text that became sure, and whether a stop string was found."""
        if not self._one_at_a_time:
            self._completion_tokens += len(delta.tokens)
            return stream.push(delta.tokens).text, False
        if self._logprobs and len(delta.logprobs) != len(delta.tokens):
            raise InternalError("a worker sent tokens without their log-probabilities")
        text = ""
        for position, token in enumerate(delta.tokens):
            self._completion_tokens += 1
            pushed = stream.push((token,))
            text += pushed.text
            if self._logprobs:
                waiting, logprob = self._logprobs[delta.choice], delta.logprobs[position]
                waiting.push(logprob, pushed.text, held=stream.held, unfinished=stream.unfinished or pushed.stopped)
            if pushed.stopped:
                return text, True
        return text, False

    def _released(self, choice: int, stopped: bool, finish: FinishReason | None) -> list[Entry]:
        waiting = self._logprobs[choice]
        if finish is None:
            return waiting.take()
        return waiting.stop() if stopped else waiting.finish(ended=finish is FinishReason.STOP)
