"""A completion of `/v1/completions`, written. Source: the OpenAI API reference, "The completion object"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.edge.api.form import Form, Said, encode
from services.edge.api.logprobs import Entry


class CompletionForm(Form):
    """`echoes`: by choice, the text that is repeated before what was generated."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, name: str, created: int, model: str, *, usage: bool, echoes: Mapping[int, str]) -> None:
        super().__init__(name, created, model, usage=usage)
        self._echoes = echoes
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._end

    def begin(self, choice: int) -> bytes:
        echo = self._echoes.get(choice)
        return self.text(choice, echo) if echo else b""

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        before = self._start + b'{"index":%d,"text":' % choice + encode(text)
        if logprobs is None:
            return before + self._after_text
        return before + b',"logprobs":' + encode(self._logprobs(choice, logprobs)) + b',"finish_reason":null}' + self._end

    def finish(self, choice: int, reason: str) -> bytes:
        head = self._start + b'{"index":%d,"text":"","logprobs":null,"finish_reason":' % choice
        return head + encode(reason) + b"}" + self._end

    def choice(self, index: int, said: Said) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes.get(index, "") + said.text,
            "logprobs": None if said.logprobs is None else self._logprobs(index, said.logprobs),
            "finish_reason": said.finish,
        }

    def _logprobs(self, choice: int, entries: Sequence[Entry]) -> dict[str, Any]:
        """The older form: parallel lists, offsets in characters of the choice's text."""
        before = len(self._echoes.get(choice, ""))
        fields = [entry.fields for entry in entries]
        return {
            "tokens": [field["token"] for field in fields],
            "token_logprobs": [field["logprob"] for field in fields],
            "top_logprobs": [{top["token"]: top["logprob"] for top in field["top_logprobs"]} for field in fields],
            "text_offset": [before + entry.start for entry in entries],
        }
