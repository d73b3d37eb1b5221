"""NATS subject matching: `*` is one token, `>` is one or more at the end."""

from __future__ import annotations

import re

breaks_framing = re.compile(r"[\x00-\x20\x7f]").search
"""Finds a blank or control character, which no subject, queue group or header name may hold: it would end its field."""


def is_pattern(subject: str) -> bool:
    return "*" in subject or ">" in subject


def matches(pattern: str, subject: str) -> bool:
    """True when a subscription to `pattern` hears `subject`."""
    if not is_pattern(pattern):
        return pattern == subject
    wanted, tokens = pattern.split("."), subject.split(".")
    for position, want in enumerate(wanted):
        if want == ">":
            return len(tokens) > position
        if position >= len(tokens) or want not in ("*", tokens[position]):
            return False
    return len(wanted) == len(tokens)
