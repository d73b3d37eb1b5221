"""What a parser of tool calls says, whatever the format: text for the reader, and calls as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of the function `name`; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next characters of the last call's arguments, which are JSON once all have come."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The last call is whole."""


Event = Content | CallBegins | Arguments | CallEnds


class ToolParser(Protocol):
    """One choice's text, read as it comes. Invariant: however the text is cut, the joined events are the same; what turns out
    to be no call comes back as content, character by character."""

    def push(self, text: str) -> list[Event]:
        """What `text` makes sure."""

    def finish(self) -> list[Event]:
        """What was held back, now that no more text comes."""
