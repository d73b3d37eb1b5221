"""One choice's ids → the text its client may see: detokenising and stop strings in their one right order.

Owns nothing but the two; counts nothing: usage is the caller's, and includes the tokens of a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from services.text.stop import StopStrings
from services.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True):
    """`text` may be empty. `stopped`: a stop string was found, nothing follows, the choice is to be cancelled.

    One a token is made: a Struct, because a dataclass takes ten times as long.
    """

    text: str
    stopped: bool


class TextStream:
    """The text of one choice. Streamed or not, the joined deltas and `finish()` are the same bytes."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        """`keep_stop`: the stop string that ends the text stays in it."""
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops, kept=keep_stop) if stops else None

    def push(self, ids: Iterable[int]) -> Delta:
        """What `ids` add to the text that is sure."""
        text = self._detokenizer.push(ids)
        if self._stops is None:
            return Delta(text, False)
        return Delta(*self._stops.push(text))

    def finish(self) -> str:
        """The text held back for a stop string that never came. To be called once, when the sequence has ended."""
        return self._stops.finish() if self._stops is not None else ""

    @property
    def held(self) -> int:
        """Characters that are held back, because they may begin a stop string."""
        return self._stops.held if self._stops is not None else 0

    @property
    def unfinished(self) -> bool:
        """Whether the last id ended within a character."""
        return self._detokenizer.unfinished
