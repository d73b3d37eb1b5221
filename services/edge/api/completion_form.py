"""A completion of `/v1/completions`, written. Source: the OpenAI API reference, "The completion object"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.edge.api.form import Form, Said
from services.edge.api.logprobs import Entry
from services.edge.api.prompt_logprobs import WrittenPrompt
from services.edge.api.written import encode


class CompletionForm(Form):
    """`echoes`: by choice, the text that is repeated before what was generated."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, name: str, created: int, model: str, *, usage: bool, echoes: Mapping[int, str]) -> None:
        super().__init__(name, created, model, usage=usage)
        self._echoes = echoes
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._end

    def begin(self, choice: int, prompt: WrittenPrompt | None = None) -> bytes:
        echo = self._echoes.get(choice, "")
        if prompt is None:
            return self.text(choice, echo) if echo else b""
        logprobs = _columns(prompt.echo, 0) if prompt.echo else None
        said = {"index": choice, "text": echo, "logprobs": logprobs, "finish_reason": None, **_table(prompt)}
        return self._start + encode(said) + self._end

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        before = self._start + b'{"index":%d,"text":' % choice + encode(text)
        if logprobs is None:
            return before + self._after_text
        return (
            before
            + b',"logprobs":'
            + encode(_columns(logprobs, len(self._echoes.get(choice, ""))))
            + b',"finish_reason":null}'
            + self._end
        )

    def finish(self, choice: int, reason: str) -> bytes:
        head = self._start + b'{"index":%d,"text":"","logprobs":null,"finish_reason":' % choice
        return head + encode(reason) + b"}" + self._end

    def choice(self, index: int, said: Said) -> dict[str, Any]:
        echo = self._echoes.get(index, "")
        logprobs = None if said.logprobs is None else _columns(said.logprobs, len(echo))
        if logprobs is not None and said.prompt is not None:
            logprobs = {name: column + logprobs[name] for name, column in _columns(said.prompt.echo, 0).items()}
        return {
            "index": index,
            "text": echo + said.text,
            "logprobs": logprobs,
            "finish_reason": said.finish,
            **_table(said.prompt),
        }


def _columns(entries: Sequence[Entry], before: int) -> dict[str, list[Any]]:
    """The older form: parallel lists, offsets in characters of the choice's text, `before` which come others."""
    fields = [entry.fields for entry in entries]
    return {
        "tokens": [field["token"] for field in fields],
        "token_logprobs": [field["logprob"] for field in fields],
        "top_logprobs": [_by_text(field) for field in fields],
        "text_offset": [before + entry.start for entry in entries],
    }


def _by_text(field: Mapping[str, Any]) -> dict[str, float] | None:
    """The alternatives and, as OpenAI has it, the token itself. Of tokens that are spelled alike the likeliest counts."""
    if field["top_logprobs"] is None:
        return None
    told: dict[str, float] = {}
    for one in (*field["top_logprobs"], field):
        told.setdefault(one["token"], one["logprob"])
    return told


def _table(prompt: WrittenPrompt | None) -> dict[str, Any]:
    return {} if prompt is None or prompt.table is None else {"prompt_logprobs": prompt.table}
