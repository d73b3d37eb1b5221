"""One call, an object of JSON that names a function and its arguments, read while it is written.

Owns the characters of the object. Knows no tags and no separators: it stops behind the object's last brace, or where one is
missing. Invariants: arguments are handed out as the model wrote them, the name before them; what turns out to be no call can be
had back unchanged; whatever escapes the model writes, all that is handed out is text that has a UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from services.text.tools.names import is_name
from services.text.tools.parser import Arguments, CallBegins, CallEnds, Event

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which an escape can make, and which has no UTF-8."""
_HEAD_MOST = 1024
"""Characters within which the usual order, name before arguments, is looked for. Any other object is read at its end."""
_NEVER = "<;"
"""Outside of strings JSON never has these, nor what a model takes for JSON. Before one the object ends, closed or not: neither a
closing tag nor the next call becomes a part of it."""


class CallReader:
    """Feed it from the opening brace on. `names`: functions that may be called, None = any that a function can have.

    `done`: the object is whole; `begun`: a call was told, so that there is no way back.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.done = False
        self.begun = False
        self._names = names
        self._parts: list[str] = []
        self._size = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._inner_done = False

    @property
    def raw(self) -> str:
        """What it was given, until a call begins."""
        return "".join(self._parts)

    def push(self, text: str) -> tuple[list[Event], str]:
        """What is sure now, and the text behind the object."""
        used, inner = self._scan(text)
        if self.begun:
            events: list[Event] = [Arguments(text[:inner])] if inner else []
        else:
            events = self._try_head(text[:used], used - inner)
        if self.done:
            events += [CallEnds()] if self.begun else self._read_whole()
        return events, text[used:]

    def _scan(self, text: str) -> tuple[int, int]:
        """How many characters belong to the object, and how many of them to its first inner object or what precedes that."""
        inner = 0 if self._inner_done else len(text)
        for position, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in _NEVER:
                self.done = True
                return position, min(inner, position)
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1 and not self._inner_done:
                    self._inner_done, inner = True, position + 1
                if self._depth <= 0:
                    self.done = True
                    return position + 1, min(inner, position + 1)
        return len(text), inner

    def _try_head(self, text: str, behind: int) -> list[Event]:
        """The call's name, if it is known by now, and its arguments so far. `behind`: characters of `text` behind them."""
        tried, self._size = self._size, self._size + len(text)
        self._parts.append(text)
        if tried >= _HEAD_MOST:
            return []
        raw = self.raw
        head = _HEAD.match(raw[:_HEAD_MOST])
        name = _string(head[1]) if head else None
        if head is None or name is None or not self._may_call(name):
            return []
        self.begun = True
        self._parts.clear()
        arguments = raw[head.end() : len(raw) - behind if self._inner_done else len(raw)]
        return [CallBegins(name), Arguments(arguments)] if arguments else [CallBegins(name)]

    def _read_whole(self) -> list[Event]:
        """The call of an object that is not in the usual order, or none."""
        call = _parsed(self.raw)
        if not isinstance(call, dict):
            return []
        name, arguments = call.get("name"), _written(call.get("arguments", call.get("parameters")))
        if not isinstance(name, str) or not self._may_call(name) or arguments is None:
            return []
        self.begun = True
        return [CallBegins(name), Arguments(arguments), CallEnds()]

    def _may_call(self, name: str) -> bool:
        return is_name(name) if self._names is None else name in self._names


def _string(spelled: str) -> str | None:
    value = _parsed(spelled)
    return value if isinstance(value, str) else None


def _written(arguments: object) -> str | None:
    """As JSON; None: they are no object. Some models write a string that holds JSON, and nothing at all where there are none."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        arguments = _parsed(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return json.dumps(arguments) if _HALF.search(text) else text


def _parsed(text: str) -> object:
    """None for what is no JSON. A line break within a string is forgiven."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value
