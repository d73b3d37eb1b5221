"""What a function may be called, and a JSON schema too. Source: the OpenAI API reference, "Create chat completion"."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
RULE = "1 to 64 letters, digits, '_' or '-'"
"""In words for the caller."""


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
