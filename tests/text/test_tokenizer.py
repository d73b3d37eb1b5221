"""The tokenizer as threads see it."""

from __future__ import annotations

import threading

import pytest

from schemas.errors import InvalidRequest
from tests.text.tiny import tiny_tokenizer


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """The library's `encode` holds the GIL to its end, and with it every stream of an edge."""
    tokenizer, ended, seen = tiny_tokenizer(), threading.Event(), list[int]()

    def encode() -> None:
        tokenizer.encode("hello world " * 200_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.wait(0.001):
        seen.append(1)
    thread.join()
    assert len(seen) > 5


def test_what_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        tiny_tokenizer().encode("\ud800")
