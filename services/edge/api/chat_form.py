"""A chat completion, written. Source: the OpenAI API reference, "The chat completion object" and "… chunk object"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from schemas.job import Tier
from services.edge.api.answer import CallDelta
from services.edge.api.form import Form, Said
from services.edge.api.logprobs import Entry
from services.edge.api.prompt_logprobs import WrittenPrompt
from services.edge.api.service_tier import service_tier
from services.edge.api.written import encode


class ChatForm(Form):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, name: str, created: int, model: str, tier: Tier, *, usage: bool) -> None:
        super().__init__(name, created, model, usage=usage, service_tier=service_tier(tier))
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._end
        self._before_text: dict[int, bytes] = {}
        self._told = False

    def begin(self, choice: int, prompt: WrittenPrompt | None = None) -> bytes:
        event = self._delta(choice) + b'{"role":"assistant","content":""' + self._after_text
        if prompt is None or prompt.table is None or self._told:
            return event
        self._told = True  # once for all choices
        return event.removesuffix(self._end) + b'],"prompt_logprobs":' + bytes(prompt.table) + self._end[1:]

    def text(self, choice: int, text: str, logprobs: Sequence[Entry] | None = None) -> bytes:
        before = self._before_text.get(choice)
        if before is None:
            before = self._before_text[choice] = self._delta(choice) + b'{"content":'
        if logprobs is None:
            return before + encode(text) + self._after_text
        return before + encode(text) + b'},"logprobs":' + encode(_logprobs(logprobs)) + b',"finish_reason":null}' + self._end

    def call(self, choice: int, call: CallDelta) -> bytes:
        return self._delta(choice) + b'{"tool_calls":[' + encode(_delta(call)) + b"]" + self._after_text

    def finish(self, choice: int, reason: str) -> bytes:
        return self._delta(choice) + b'{},"logprobs":null,"finish_reason":' + encode(reason) + b"}" + self._end

    def choice(self, index: int, said: Said) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(said),
            "logprobs": None if said.logprobs is None else _logprobs(said.logprobs),
            "finish_reason": said.finish,
        }

    def beside(self, said: dict[int, Said]) -> dict[str, Any]:
        table = next((one.prompt.table for one in said.values() if one.prompt is not None), None)
        return {} if table is None else {"prompt_logprobs": table}

    def _delta(self, choice: int) -> bytes:
        return self._start + b'{"index":%d,"delta":' % choice


def _delta(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}


def _call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls:
        calls = [call for call in said.calls if call.name]
        joined = ["".join(delta.arguments for delta in said.calls if delta.index == call.index) for call in calls]
        message["content"] = said.text or None
        message["tool_calls"] = [_call(replace(call, arguments=text)) for call, text in zip(calls, joined, strict=True)]
    return message


def _logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    return {"content": [entry.fields for entry in entries], "refusal": None}
