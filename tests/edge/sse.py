"""A strict reader of chat completion streams: every invariant of a stream is checked while it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FINISHES = {"stop", "length"}


@dataclass
class ReadChoice:
    content: str = ""
    finish: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


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
    """Raises AssertionError for the first rule that does not hold."""
    blocks = events(data)
    read = Read(comments=sum(block.startswith(":") for block in blocks))
    blocks = [block for block in blocks if not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    same: set[tuple[str, int, str, str]] = set()
    for position, block in enumerate(blocks[:-1]):
        assert block.startswith("data: ")
        chunk = json.loads(block[6:])
        if "error" in chunk:
            assert position == len(blocks) - 2
            read.error = chunk["error"]
            return read
        same.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        read.chunks.append(chunk)
        if usage and position == len(blocks) - 2:
            assert chunk["choices"] == []
            read.usage = chunk["usage"]
        else:
            assert chunk.get("usage") is None
            assert ("usage" in chunk) == usage
            (choice,) = chunk["choices"]
            first = choice["index"] not in read.choices
            _choice(choice, read.choices.setdefault(choice["index"], ReadChoice()), first=first)
    assert len(same) == 1
    assert all(choice.finish in FINISHES for choice in read.choices.values())
    assert read.choices
    return read


def _choice(choice: dict[str, Any], read: ReadChoice, *, first: bool) -> None:
    assert read.finish is None, "something follows the finish"
    delta = choice["delta"]
    assert ("role" in delta) == first
    if first:
        assert delta == {"role": "assistant", "content": ""}
    elif choice["finish_reason"] is None:
        assert delta["content"] != "" or choice["logprobs"]["content"]
    if choice["logprobs"] is not None:
        assert choice["logprobs"]["refusal"] is None
        read.logprobs += choice["logprobs"]["content"]
    read.content += delta.get("content", "")
    read.finish = choice["finish_reason"]
