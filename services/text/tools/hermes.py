"""Calls between tags, as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Source: NousResearch/Hermes-Function-Calling; the chat template of Qwen2.5. Text may come before, between and after; white space
beside a call belongs to the call.
"""

from __future__ import annotations

from services.text.tools.call import CallReader
from services.text.tools.parser import Content, Event

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text is held back while it may become a tag, and white space while a tag may follow it.

    Each of the four reading methods takes what it can from `_held`; None means that it needs more text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._opened = ""
        self._call = CallReader()
        self._read = self._text

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and (step := self._read()) is not None:
            events += step
        return events

    def finish(self) -> list[Event]:
        if self._read in (self._text, self._between):
            rest = self._held if self._read == self._text else self._held.lstrip()
        else:
            rest = "" if self._call.begun else self._opened + self._call.raw + self._held
        self._held = ""
        return [Content(rest)] if rest else []

    def _text(self) -> list[Event] | None:
        at = self._held.find(OPEN)
        if at < 0:
            sure = _sure(self._held)
            text, self._held = self._held[:sure], self._held[sure:]
            return [Content(text)] if text else None
        text = self._held[:at].rstrip()
        self._opened, self._held = self._held[len(text) : at + len(OPEN)], self._held[at + len(OPEN) :]
        self._call, self._read = CallReader(), self._before_object
        return [Content(text)] if text else []

    def _between(self) -> list[Event] | None:
        """After a call: white space before text, or before the next call, is dropped."""
        self._held = self._held.lstrip()
        if not self._held:
            return None
        self._read = self._text
        return []

    def _before_object(self) -> list[Event] | None:
        stripped = self._held.lstrip()
        if not stripped:
            return None
        blank = self._held[: len(self._held) - len(stripped)]
        if stripped[0] != "{":
            return self._give_back(self._opened + blank, stripped)
        self._opened, self._held, self._read = self._opened + blank, stripped, self._object
        return []

    def _object(self) -> list[Event] | None:
        events, self._held = self._call.push(self._held)
        if not self._call.done:
            return events or None
        if not self._call.begun:
            return self._give_back(self._opened + self._call.raw, self._held)
        self._read = self._after_object
        return events

    def _after_object(self) -> list[Event] | None:
        """The closing tag, after white space and a brace too many, or another object within the same tags; a model that forgets
        the tag is forgiven."""
        self._held = self._held.lstrip().lstrip("}").lstrip()
        if self._held.startswith("{"):
            self._opened, self._call, self._read = "", CallReader(), self._object
            return []
        if CLOSE.startswith(self._held) and self._held != CLOSE:
            return None
        self._held, self._read = self._held.removeprefix(CLOSE), self._between
        return []

    def _give_back(self, text: str, held: str) -> list[Event]:
        """It was no call. What follows it is read as text."""
        self._held, self._read = held, self._text
        return [Content(text)]


def _sure(text: str) -> int:
    """The length of the beginning that is content whatever follows: not white space at its end, nor what may open a tag."""
    for held in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-held:]):
            text = text[:-held]
            break
    return len(text.rstrip())
