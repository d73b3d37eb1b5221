"""How an answer is written: as server-sent events while it comes, or as one JSON object at its end.

All that does not change within a stream is encoded once; a token costs the encoding of its text only. Invariant: each event is
one `data: ` line of valid UTF-8 JSON and an empty line. Source: the OpenAI API reference, "Streaming".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import HeadraceError
from services.edge.api.answer import CallDelta, Piece
from services.edge.api.errors import envelope
from services.edge.api.logprobs import Entry
from services.edge.api.prompt_logprobs import WrittenPrompt
from services.edge.api.usage import Usage
from services.edge.api.written import encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(slots=True)
class Said:
    """All that one choice said. `logprobs` is None when they were not asked for."""

    text: str = ""
    finish: str | None = None
    logprobs: list[Entry] | None = None
    calls: list[CallDelta] = field(default_factory=list)
    prompt: WrittenPrompt | None = None

    def add(self, piece: Piece) -> None:
        self.prompt = piece.prompt or self.prompt
        self.text += piece.text
        self.finish = piece.finish
        self.calls += piece.calls
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs


class Form:
    """One endpoint's objects. `usage`: the client asked for it in the stream, so every other chunk says null. `about`: what else
    each of them says."""

    chunk_object: str
    whole_object: str

    def __init__(self, name: str, created: int, model: str, *, usage: bool, **about: str) -> None:
        self._about = {"id": name, "created": created, "model": model, **about}
        self._usage = usage
        self._start = b"data: " + encode({"object": self.chunk_object, **self._about})[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def begin(self, choice: int, prompt: WrittenPrompt | None = None) -> bytes:
        """Before a choice's first text. `prompt`: how likely it was, if that was asked for."""
        raise NotImplementedError

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        """`logprobs`: of the tokens of this text; None when they were not asked for."""
        raise NotImplementedError

    def call(self, choice: int, call: CallDelta) -> bytes:
        """More of a tool call."""
        raise NotImplementedError

    def finish(self, choice: int, reason: str) -> bytes:
        """The last event of a choice."""
        raise NotImplementedError

    def choice(self, index: int, said: Said) -> dict[str, Any]:
        """One choice of the whole answer."""
        raise NotImplementedError

    def beside(self, said: dict[int, Said]) -> dict[str, Any]:
        """What the whole answer has beside its choices."""
        return {}

    def usage(self, usage: Usage) -> bytes:
        """After all finishes; empty unless asked for."""
        return self._start + b'],"usage":' + encode(usage.fields()) + b"}\n\n" if self._usage else b""

    def whole(self, said: dict[int, Said], usage: Usage) -> bytes:
        """The answer in one piece, choices in order."""
        listed = [self.choice(index, said[index]) for index in sorted(said)]
        about = {"object": self.whole_object, **self._about}
        return encode({**about, "choices": listed, "usage": usage.fields(), **self.beside(said)})

    @staticmethod
    def error(error: HeadraceError) -> bytes:
        """A failure after the first byte."""
        return b"data: " + envelope(error) + b"\n\n"
