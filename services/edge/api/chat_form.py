"""A chat completion, written. Source: the OpenAI API reference, "The chat completion object" and "… chunk object"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.reply import FinishReason
from services.edge.api.form import Form, Said, encode
from services.edge.api.logprobs import Entry


class ChatForm(Form):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, name: str, created: int, model: str, *, usage: bool) -> None:
        super().__init__(name, created, model, usage=usage)
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._end
        self._before_text: dict[int, bytes] = {}

    def begin(self, choice: int) -> bytes:
        return self._delta(choice) + b'{"role":"assistant","content":""' + self._after_text

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        before = self._before_text.get(choice)
        if before is None:
            before = self._before_text[choice] = self._delta(choice) + b'{"content":'
        if logprobs is None:
            return before + encode(text) + self._after_text
        return before + encode(text) + b'},"logprobs":' + encode(_logprobs(logprobs)) + b',"finish_reason":null}' + self._end

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        return self._delta(choice) + b'{},"logprobs":null,"finish_reason":' + encode(reason) + b"}" + self._end

    def choice(self, index: int, said: Said) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": said.text, "refusal": None},
            "logprobs": None if said.logprobs is None else _logprobs(said.logprobs),
            "finish_reason": said.finish,
        }

    def _delta(self, choice: int) -> bytes:
        return self._start + b'{"index":%d,"delta":' % choice


def _logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    return {"content": [entry.fields for entry in entries], "refusal": None}
