"""An answer in which tool calls are looked for: text in, text and calls out.

Owns what each choice has called so far. Invariants: ids and indices of calls depend on the job, the choice and their order only;
the joined pieces do not depend on how the text came; text that turned out to be no call is content.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from schemas.explanation import Explanation
from schemas.reply import FinishReason
from services.edge.api.answer import Answer, CallDelta, Piece
from services.edge.api.tools import Tools
from services.edge.api.usage import Usage
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

    def read(self, piece: Piece) -> Piece:
        """What of it is content, what calls. A finish of its own: the last call that is allowed is whole."""
        events = self._parser.push(piece.text)
        if piece.finish is not None:
            events += self._parser.finish()
        text, calls, enough = "", list[CallDelta](), False
        for event in events:
            if enough:
                break
            text, enough = self._take(event, text, calls)
        finish = FinishReason.STOP if enough else piece.finish
        if finish == FinishReason.STOP and self._calls:
            finish = self._ends_as
        return replace(piece, text=text, calls=tuple(calls), finish=finish)

    def _take(self, event: Event, text: str, calls: list[CallDelta]) -> tuple[str, bool]:
        match event:
            case Content():
                return text + event.text, False
            case CallBegins():
                self._calls += 1
                calls.append(CallDelta(self._calls - 1, f"{self._prefix}{self._calls - 1}", event.name))
            case Arguments():
                calls.append(CallDelta(self._calls - 1, arguments=event.text))
            case CallEnds():
                return text, not self._several
        return text, False


class CallingAnswer:
    """`trackers`: one a choice."""

    def __init__(self, answer: Answer, trackers: Sequence[CallTracker]) -> None:
        self._answer = answer
        self._trackers = trackers

    @property
    def id(self) -> str:
        return self._answer.id

    @property
    def usage(self) -> Usage:
        return self._answer.usage

    @property
    def done(self) -> bool:
        return self._answer.done

    @property
    def explanation(self) -> Explanation | None:
        return self._answer.explanation

    async def admitted(self) -> None:
        """Raises the `HeadraceError` that refused the job."""
        await self._answer.admitted()

    async def next(self, timeout: float) -> list[Piece] | None:
        """As `Answer.next`."""
        pieces = await self._answer.next(timeout)
        if pieces is None:
            return None
        read = [self._trackers[piece.choice].read(piece) for piece in pieces]
        for before, after in zip(pieces, read, strict=True):
            if before.finish is None and after.finish is not None:
                self._answer.stop(after.choice)
        return [piece for piece in read if not piece.empty]

    def cancel(self) -> None:
        self._answer.cancel()
