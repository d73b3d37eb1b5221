"""Generated ids → text, piece by piece: never half a character.

Owns the bytes of one unfinished character. Invariant: however the ids are split over calls, the joined text is the same. Bytes
that can never become a character are U+FFFD as in Python's and Rust's lossy decoding; an unfinished character at the very
end is left out, because the reader has no use for it and a client that sends the text back would poison the next prompt.

A table look-up and CPython's incremental UTF-8 decoder: O(1) a token, no re-decoding of a window.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from services.text.vocabulary import Vocabulary

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. Special tokens, and ids the vocabulary does not know, have none."""

    __slots__ = ("_at_start", "_bytes_of", "_decode", "_decoder")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of.get
        self._decoder = _utf8("replace")
        self._decode = self._decoder.decode
        self._at_start = vocabulary.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is unfinished."""
        bytes_of = self._bytes_of
        text = self._decode(b"".join([bytes_of(token, b"") for token in ids]))
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    @property
    def unfinished(self) -> bool:
        """Whether half a character waits for its other half."""
        return bool(self._decoder.getstate()[0])
