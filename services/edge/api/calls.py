"""Tool calls looked for in the text of an answer: pieces of text in, pieces of text and calls out.

Owns what each choice has called so far. Invariants: ids and indices of calls depend on the job, the choice and their order only;
the joined pieces do not depend on how the text came; text that turned out to be no call is content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from schemas.reply import FinishReason
from services.edge.api.answer import CallDelta, Piece
from services.edge.api.tools import Tools
from services.text.tools.parser import Arguments, CallBegins, CallEnds, Content, Event, ToolParser

TOOL_CALLS = "tool_calls"


class CallTracker:
    """One choice's calls. `prefix` makes their ids."""

    def __init__(self, parser: ToolParser, tools: Tools, prefix: str) -> None:
        self._parser = parser
        self._several = tools.several
        self._ends_as = FinishReason.STOP if tools.named else TOOL_CALLS  # a function that the caller named: as OpenAI's API
        self._prefix = prefix
        self._calls = 0

    def read(self, piece: Piece) -> list[Piece]:
        """What of it is content, what calls, in their order. A finish of its own: the last call that is allowed is whole."""
        events = self._parser.push(piece.text)
        if piece.finish is not None:
            events += self._parser.finish()
        parts, enough = [_Part()], False
        for event in events:
            if isinstance(event, Content) and parts[-1].calls:
                parts.append(_Part())
            enough = self._take(event, parts[-1])
            if enough:
                break
        finish = FinishReason.STOP if enough else piece.finish
        if finish == FinishReason.STOP and self._calls:
            finish = self._ends_as
        first, *more = parts
        pieces = [replace(piece, text=first.text, calls=tuple(first.calls), finish=None)]
        pieces += [Piece(piece.choice, part.text, calls=tuple(part.calls)) for part in more]
        return [*pieces[:-1], replace(pieces[-1], finish=finish)]

    def _take(self, event: Event, part: _Part) -> bool:
        """Whether that is enough."""
        match event:
            case Content():
                part.text += event.text
            case CallBegins():
                self._calls += 1
                part.calls.append(CallDelta(self._calls - 1, f"{self._prefix}{self._calls - 1}", event.name))
            case Arguments():
                part.calls.append(CallDelta(self._calls - 1, arguments=event.text))
            case CallEnds():
                return not self._several
        return False


@dataclass(slots=True)
class _Part:
    """Text, and the calls behind it."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)
