"""Log-probabilities of a prompt's own tokens, written for the client: in vLLM's form, and in OpenAI's older one for an echo.

Owns what was written, once a prompt. The first token has nothing before it, so it has none: null. What is long is written in a
thread: a long prompt with 20 alternatives a token has hundreds of thousands of them.
Source: vLLM's OpenAI-compatible server, `prompt_logprobs`; the OpenAI API reference, completions, `echo` with `logprobs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.reply import Logprob
from services.edge.api.logprobs import Entry, Spell, breaks_off
from services.edge.api.ports import Text

_INLINE = 512
"""Values: about a millisecond of work."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The echoed text, and how many alternatives its tokens' log-probabilities have."""

    text: str
    alternatives: int


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """`table`: vLLM's list, encoded; None when it was not asked for. `echo`: of the echoed tokens, one each, or none at all."""

    table: msgspec.Raw | None = None
    echo: tuple[Entry, ...] = ()


class PromptWriter:
    """`table`: alternatives in vLLM's list, None = no list; `stream` is a fresh one."""

    def __init__(
        self, ids: Sequence[int], spell: Spell, stream: Callable[[], Text], table: int | None, echo: Echo | None
    ) -> None:
        self._ids = ids
        self._spell = spell
        self._stream = stream
        self._table = table
        self._echo = echo
        self._written: WrittenPrompt | None = None

    async def write(self, logprobs: Sequence[Logprob]) -> WrittenPrompt:
        """`logprobs`: of all tokens but the first. Safe to cancel, and to call again."""
        if self._written is None:
            values = sum(1 + len(logprob.top) for logprob in logprobs)
            small = values <= _INLINE
            self._written = self._write(logprobs) if small else await asyncio.to_thread(self._write, tuple(logprobs))
        return self._written

    def _write(self, logprobs: Sequence[Logprob]) -> WrittenPrompt:
        table = None
        if self._table is not None:
            table = msgspec.Raw(msgspec.json.encode([None, *(self._row(logprob, self._table) for logprob in logprobs)]))
        return WrittenPrompt(table, () if self._echo is None else self._echoed(logprobs, self._echo))

    def _row(self, logprob: Logprob, alternatives: int) -> dict[str, dict[str, Any]]:
        """By id: the likeliest and, wherever it stands, the token itself."""
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top[:alternatives], 1)]
        if all(token != logprob.token for token, _, _ in ranked):
            ranked.append((logprob.token, logprob.logprob, logprob.rank))
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": self._spell(token)[0]} for token, value, rank in ranked
        }

    def _echoed(self, logprobs: Sequence[Logprob], echo: Echo) -> tuple[Entry, ...]:
        starts = self._starts(echo.text)
        entries = [Entry(0, 0, {"token": self._spell(self._ids[0])[0], "logprob": None, "top_logprobs": None})]
        for start, logprob in zip(starts[1:], logprobs, strict=True):
            top = [{"token": self._spell(token)[0], "logprob": value} for token, value in logprob.top[: echo.alternatives]]
            fields = {"token": self._spell(logprob.token)[0], "logprob": logprob.logprob, "top_logprobs": top}
            entries.append(Entry(start, start, fields))
        return tuple(entries)

    def _starts(self, text: str) -> list[int]:
        """Where each token begins in the echoed text, which may spell special tokens or leave them out."""
        stream, starts, at = self._stream(), list[int](), 0
        for token in self._ids:
            spelled, data = self._spell(token)
            starts.append(at + (stream.unfinished and breaks_off(data)))
            if data is None and spelled and text.startswith(spelled, at):
                at += len(spelled)
            at += len(stream.push((token,)).text)
        return starts
