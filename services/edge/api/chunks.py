"""Server-sent events of a chat completion, as bytes.

All that does not change within a stream is encoded once; a token costs the encoding of its text only. Invariant: each event is
one `data: ` line of valid UTF-8 JSON and an empty line. Source: the OpenAI API reference, "The chat completion chunk object".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.errors import HeadraceError
from schemas.reply import FinishReason
from services.edge.api.errors import envelope
from services.edge.api.logprobs import Entry
from services.edge.api.usage import usage_fields

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.encode


class Chunks:
    """The events of one stream. `usage`: the client asked for it, so every other chunk says null."""

    def __init__(self, completion: str, created: int, model: str, *, usage: bool) -> None:
        head = {"id": completion, "object": "chat.completion.chunk", "created": created, "model": model}
        self._usage = usage
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._end
        self._before_text: dict[int, bytes] = {}

    def role(self, choice: int) -> bytes:
        """The first event of a choice."""
        return self._delta(choice) + b'{"role":"assistant","content":""' + self._after_text

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        """`logprobs`: of the tokens of this text; None when they were not asked for."""
        before = self._before_text.get(choice)
        if before is None:
            before = self._before_text[choice] = self._delta(choice) + b'{"content":'
        if logprobs is None:
            return before + _encode(text) + self._after_text
        return (
            before + _encode(text) + b'},"logprobs":' + _encode(logprobs_field(logprobs)) + b',"finish_reason":null}' + self._end
        )

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        """The last event of a choice."""
        return self._delta(choice) + b'{},"logprobs":null,"finish_reason":' + _encode(reason) + b"}" + self._end

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> bytes:
        """After all finishes; empty unless asked for."""
        if not self._usage:
            return b""
        return self._start + b'],"usage":' + _encode(usage_fields(prompt_tokens, completion_tokens, cached_tokens)) + b"}\n\n"

    @staticmethod
    def error(error: HeadraceError) -> bytes:
        """A failure after the first byte."""
        return b"data: " + envelope(error) + b"\n\n"

    def _delta(self, choice: int) -> bytes:
        return self._start + b'{"index":%d,"delta":' % choice


def logprobs_field(entries: Sequence[Entry] | None) -> dict[str, Any] | None:
    """OpenAI's logprobs object; None when they were not asked for."""
    return None if entries is None else {"content": entries, "refusal": None}
