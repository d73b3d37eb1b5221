"""A strict reader of streams, of both completion endpoints: every invariant of a stream is checked while it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FINISHES = {"stop", "length", "tool_calls"}
CHAT, TEXT = "chat.completion.chunk", "text_completion"


@dataclass
class ReadChoice:
    """`calls`: as the whole answer has them. `logprobs`: of a chat."""

    content: str = ""
    finish: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Read:
    """What a stream said; `content`, `finish` and `logprobs` are those of its only choice."""

    choices: dict[int, ReadChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0

    @property
    def content(self) -> str:
        return self._only.content

    @property
    def finish(self) -> str | None:
        return self._only.finish

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return self._only.logprobs

    @property
    def _only(self) -> ReadChoice:
        assert self.choices.keys() <= {0}
        return self.choices.get(0, ReadChoice())


def events(data: bytes) -> list[str]:
    """The events of a stream, comments left out. Each is whole, ends in a blank line, and is valid UTF-8."""
    assert data.endswith(b"\n\n")
    blocks = data[:-2].split(b"\n\n")
    assert all(block and b"\n" not in block and b"\r" not in block for block in blocks), blocks
    return [block.decode("utf-8") for block in blocks]


def read_stream(data: bytes, *, usage: bool = False) -> Read:
    """A stream that came to its end. Raises AssertionError for the first rule that does not hold."""
    blocks = events(data)
    assert blocks[-1] == "data: [DONE]"
    read = read_part(blocks[:-1], usage=usage)
    if read.error is None:
        assert read.choices
        assert all(choice.finish in FINISHES for choice in read.choices.values())
        assert (read.usage is not None) == usage
    return read


def read_part(blocks: list[str], *, usage: bool = False) -> Read:
    """The events of a stream up to any place before its `[DONE]`."""
    read = Read(comments=sum(block.startswith(":") for block in blocks))
    same: set[tuple[str, int, str, str]] = set()
    for block in blocks:
        if block.startswith(":"):
            continue
        assert read.error is None, "something follows the error"
        assert read.usage is None, "something follows the usage"
        assert block.startswith("data: ")
        assert block.splitlines() == [block], "a client that splits text sees another event"
        chunk = json.loads(block[6:])
        if "error" in chunk:
            assert set(chunk["error"]) == {"message", "type", "param", "code"}
            read.error = chunk["error"]
            continue
        same.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        assert len(same) == 1
        read.chunks.append(chunk)
        assert ("usage" in chunk) == usage
        if chunk.get("usage") is not None:
            assert chunk["choices"] == []
            assert all(choice.finish is not None for choice in read.choices.values())
            read.usage = chunk["usage"]
        else:
            (choice,) = chunk["choices"]
            _choice(chunk["object"], choice, read.choices)
    return read


def _choice(kind: str, choice: dict[str, Any], choices: dict[int, ReadChoice]) -> None:
    first = choice["index"] not in choices
    read = choices.setdefault(choice["index"], ReadChoice())
    assert read.finish is None, "something follows the finish"
    read.finish = choice["finish_reason"]
    if kind == TEXT:
        assert choice.keys() >= {"text", "logprobs"}
        assert choice["text"] or choice["logprobs"] or read.finish or "prompt_logprobs" in choice
        read.content += choice["text"]
    else:
        assert kind == CHAT
        _delta(choice, read, first=first)


def _delta(choice: dict[str, Any], read: ReadChoice, *, first: bool) -> None:
    delta = choice["delta"]
    assert ("role" in delta) == first
    if first:
        assert delta == {"role": "assistant", "content": ""}
    elif choice["finish_reason"] is not None:
        assert delta == {}
    else:
        assert delta.keys() in ({"content"}, {"tool_calls"})
        assert delta.get("content") != "" or choice["logprobs"]["content"]
    if choice["logprobs"] is not None:
        assert choice["logprobs"]["refusal"] is None
        read.logprobs += choice["logprobs"]["content"]
    read.content += delta.get("content", "")
    for call in delta.get("tool_calls", ()):
        _call(call, read.calls)


def _call(delta: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """The first delta of a call has its id and name, the others go on with the last call."""
    if "id" in delta:
        assert delta["index"] == len(calls)
        assert delta["type"] == "function"
        assert delta["function"].keys() == {"name", "arguments"}
        calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
    else:
        assert delta.keys() == {"index", "function"}
        assert delta["index"] == len(calls) - 1
        assert delta["function"].keys() == {"arguments"}
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
