"""Log-probabilities of one choice in OpenAI's form, given out with the text of their tokens.

They are the model's own, before temperature, penalties, biases and filters. Invariant: an entry leaves when the last character of
its token does, not before; a token that only a stop string or the end of the answer consumed has none. So the bytes of all
entries, joined, are the content (but for an unfinished character at its very end, which has entries and no text).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.reply import Logprob

Spell = Callable[[int], tuple[str, bytes | None]]
"""A token's text, and its bytes unless it is a special token."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One token's object, and the characters of the answer that it is, from `start` up to `end`."""

    start: int
    end: int
    fields: dict[str, Any]


def breaks_off(data: Sequence[int] | None) -> bool:
    """Whether an unfinished character before a token of these bytes can be none any more: then its U+FFFD is not this token's."""
    return data[0] & 0xC0 != 0x80 if data else False


class TokenLogprobs:
    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._waiting: deque[Entry] = deque()
        self._decoded = 0
        self._visible = 0
        self._unfinished = False

    def push(self, logprob: Logprob, text: str, *, held: int, unfinished: bool) -> None:
        """A token after which `text` became visible and `held` characters are held back.

        `unfinished`: it ended within a character, or within a stop string that is complete now.
        """
        fields = self._fields(logprob)
        start = self._decoded + (self._unfinished and breaks_off(fields["bytes"]))
        self._visible += len(text)
        self._decoded, self._unfinished = self._visible + held, unfinished
        self._waiting.append(Entry(start, self._decoded + unfinished, fields))

    def take(self) -> list[Entry]:
        """The entries of what is wholly visible, but for a special token that may turn out to be the end."""
        return list(self._release(lambda waiting: waiting.end <= self._visible and not self._may_be_the_end(waiting)))

    def stop(self) -> list[Entry]:
        """A stop string was found: the last entries, those of tokens that are at least partly visible."""
        return list(self._release(lambda waiting: waiting.start < self._visible or waiting.end <= self._visible))

    def finish(self, *, ended: bool) -> list[Entry]:
        """Nothing is held back any more. `ended`: the last token said so; if it is a special one it is no part of the text."""
        if ended and self._waiting and self._may_be_the_end(self._waiting[-1]):
            self._waiting.pop()
        return list(self._release(lambda _: True))

    def _may_be_the_end(self, entry: Entry) -> bool:
        return entry is self._waiting[-1] and entry.fields["bytes"] is None

    def _release(self, due: Callable[[Entry], bool]) -> Iterable[Entry]:
        while self._waiting and due(self._waiting[0]):
            yield self._waiting.popleft()

    def _fields(self, logprob: Logprob) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in logprob.top]
        return self._one(logprob.token, logprob.logprob) | {"top_logprobs": top}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text, data = self._spell(token)
        return {"token": text, "logprob": value, "bytes": None if data is None else list(data)}
