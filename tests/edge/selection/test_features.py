"""What a request is like."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.edge.selection.features import looks_like_code, of_messages, of_texts

PYTHON = "def f(x):\n    for y in x:\n        print(y)"
C = "int main() {\n  return 0;\n}"
SQL = "SELECT *\nFROM t;\nDELETE FROM u;"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Why is the sky blue?", False),
        ("", False),
        ("One; two; three.", False),
        ("My list:\n- milk\n- eggs\n\nWhat for: a cake (or two).", False),
        ("For my mother:\nwrite a poem.\nIf you can, make it rhyme.", False),
        ("```\nanything\n```", True),
        (PYTHON, True),
        (C, True),
        (SQL, True),
        ("Fix it:\n" + C, True),
        ("x = 1;", False),
    ],
)
def test_code(text: str, code: bool) -> None:
    assert looks_like_code(text) is code


@pytest.mark.parametrize("text", ["\n" * 10**6, " " * 10**6, ";" * 10**6, "; " * 10**6, ("for " + ":" * 999 + "x\n") * 1000])
def test_no_text_takes_long(text: str) -> None:
    """Not a speed: what grows with the square of the length takes minutes here."""
    began = time.monotonic()
    looks_like_code(text)
    assert time.monotonic() - began < 20


def test_counts() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": "de"},
    ]
    found = of_messages(messages, "legal", tools=True)
    assert (found.characters, found.turns, found.code, found.tools, found.hint) == (13, 2, False, True, "legal")
    assert of_texts(["ab", C], "").code
    assert (of_texts(["ab", "cde"], "").characters, of_texts(["ab"], "").turns) == (5, 1)


def test_of_many_texts_only_so_much_is_looked_at() -> None:
    filler = ["word " * 13_000] * 64
    assert of_texts([*filler, C], "").code, "the newest"
    assert not of_texts([C, *filler], "").code
