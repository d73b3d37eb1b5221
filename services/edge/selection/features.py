"""What a request is like, as the rules of `auto` see it. Pure functions; no text leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from services.settings.selection import Features

HINT_HEADER = "x-headrace-hint"
HINT_KEY = "headrace_hint"
_LOOKED_AT, _LOOKED_AT_OF_ALL = 65_536, 262_144
"""Characters of each text, and of all, in which code is looked for: this runs on the event loop."""
_CODE_LINE = re.compile(
    r"^(?:.*[;{}]|[ \t]*(?:async |public |static |export )*(?:def|class|for|if|elif|else|while|with|try|fn|func|function)\b"
    r".*[:({])[ \t]*$",
    re.MULTILINE,
)


def of_messages(messages: Iterable[Mapping[str, Any]], hint: str, *, tools: bool = False) -> Features:
    """Of a chat."""
    messages = list(messages)
    texts = [text for message in messages for text in _texts(message)]
    turns = sum(message.get("role") == "user" for message in messages)
    return Features(sum(map(len, texts)), turns, _some_code(texts), tools, hint)


def of_texts(texts: Sequence[str], hint: str) -> Features:
    """Of raw prompts."""
    return Features(sum(map(len, texts)), 1, _some_code(texts), hint=hint)


def _some_code(texts: Sequence[str]) -> bool:
    """The newest text first."""
    left = _LOOKED_AT_OF_ALL
    for text in reversed(texts):
        if left <= 0:
            return False
        if looks_like_code(text[:left]):
            return True
        left -= min(len(text), _LOOKED_AT)
    return False


def looks_like_code(text: str) -> bool:
    """A fenced block, or two lines as programs have them: that end in ; { or }, or begin with a keyword and end in : ( or {."""
    head = text[:_LOOKED_AT]
    if "```" in head:
        return True
    lines = _CODE_LINE.finditer(head)
    return next(lines, None) is not None and next(lines, None) is not None


def read_hint(header: str | None, metadata: Any) -> str:
    """What the caller says it needs, "" = nothing; a header counts more than the body. Raises `InvalidRequest`."""
    value = header if header is not None else metadata.get(HINT_KEY) if isinstance(metadata, dict) else None
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"'metadata.{HINT_KEY}' must be a string.", param=f"metadata.{HINT_KEY}")
    return (value or "").strip().lower()


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content)
