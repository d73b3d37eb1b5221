"""Calls as Llama 3 writes them: the whole answer is one object `{"name": …, "parameters": {…}}`, or several between semicolons.

Source: Meta's "Llama 3.1 model card and prompt formats", JSON based tool calling. `<|python_tag|>`, which may come first, is a
special token and no text. An answer that does not begin with a brace, or whose object names none of the request's functions, is
text.
"""

from __future__ import annotations

from collections.abc import Collection

from services.text.tools.call import CallReader
from services.text.tools.parser import Content, Event

_BLANK = " \t\r\n"
_BETWEEN = _BLANK + ";,"


class Llama3Parser:
    """`names`: the functions of the request."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._call: CallReader | None = None
        self._opened = ""
        self._called = False
        self._is_text = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and (step := self._text() if self._is_text else self._calls()) is not None:
            events += step
        return events

    def finish(self) -> list[Event]:
        rest = self._held
        if self._call is not None:
            rest = "" if self._call.begun else self._opened + self._call.raw + rest
        elif self._called:
            rest = rest.lstrip(_BETWEEN)
        self._held, self._call = "", None
        return [Content(rest)] if rest else []

    def _text(self) -> list[Event]:
        text, self._held = self._held, ""
        return [Content(text)]

    def _calls(self) -> list[Event] | None:
        if self._call is None and not self._open():
            return [] if self._is_text else None
        assert self._call is not None
        events, self._held = self._call.push(self._held)
        if not self._call.done:
            return events or None
        if not self._call.begun:
            self._is_text, self._held = True, self._opened + self._call.raw + self._held
        self._called, self._call = self._called or not self._is_text, None
        return events

    def _open(self) -> bool:
        """Whether an object begins; text instead makes all that follows text."""
        stripped = self._held.lstrip(_BETWEEN if self._called else _BLANK)
        if not stripped:
            return False
        if stripped[0] != "{":
            self._is_text = True
            self._held = stripped if self._called else self._held
            return False
        self._opened = "" if self._called else self._held[: len(self._held) - len(stripped)]
        self._held, self._call = stripped, CallReader(self._names)
        return True
