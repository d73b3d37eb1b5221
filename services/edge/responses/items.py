"""Items, the units of a conversation: as clients send them, as they are kept, and as the chat template reads them.

Kept items are whole: each has an id, a type, a status and its content in parts. Pure functions. Source: the OpenAI API reference,
"Responses", "Input item list".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from schemas.errors import EmptyArray, InvalidRequest, UnsupportedParameter

Item = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the field that holds it."""


def new_id(random: Random) -> str:
    """What tells one item, or conversation, from all others; without the prefix of its kind."""
    return f"{random.getrandbits(128):032x}"


def read_items(value: Any, random: Random, param: str = "input") -> list[Item]:
    """`value`: a string, or items; null is none. Those without an id get one, drawn from `random`.

    Raises `InvalidRequest` that names the place.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequest(f"'{param}' must be a string or an array of items.", param=param)
    return [_item(item, random, f"{param}[{index}]") for index, item in enumerate(value)]


def must_be_new(items: Sequence[Item], before: Iterable[str], param: str = "input") -> None:
    """An id names one item of all that was said: pages of items go on behind it. `before`: the ids that name others.

    Raises `InvalidRequest` that names the place.
    """
    known = set(before)
    for index, item in enumerate(items):
        if item["id"] in known:
            raise InvalidRequest(f"There is an item with the id {item['id'][:64]!r} already.", param=f"{param}[{index}].id")
        known.add(item["id"])


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Chat messages; what the assistant said and called in one turn is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message":
                messages.append({"role": item["role"], "content": "".join(_text(part) for part in item["content"])})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                called = {"name": item["name"], "arguments": item["arguments"]}
                messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": called})
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _output(item["output"])})
    return messages


def _item(value: Any, random: Random, param: str) -> Item:
    if not isinstance(value, dict):
        raise InvalidRequest("An item must be an object.", param=param)
    kind = value.get("type") or "message"
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise UnsupportedParameter(f"Items of type {str(kind)[:40]!r} are not supported.", param=f"{param}.type")
    prefix, fields = read(value, param)
    name = value.get("id")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest("'id' must be 1 to 128 letters, digits, '_', '.' or '-'.", param=f"{param}.id")
    return {"id": name or f"{prefix}_{new_id(random)}", "type": kind, "status": "completed", **fields}


def _message(value: dict[str, Any], param: str) -> tuple[str, Item]:
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"'role' must be one of {', '.join(ROLES)}.", param=f"{param}.role")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest("'content' must be a string or an array of text parts.", param=f"{param}.content")
    if not content:
        raise EmptyArray("'content' must hold at least one part.", param=f"{param}.content")
    texts = [_part(part, f"{param}.content[{index}]") for index, part in enumerate(content)]
    said = role == "assistant"
    return "msg", {"role": role, "content": [said_text(text) if said else {"type": "input_text", "text": text} for text in texts]}


def _call(value: dict[str, Any], param: str) -> tuple[str, Item]:
    return "fc", {name: _string(value, name, param) for name in ("call_id", "name", "arguments")}


def _call_output(value: dict[str, Any], param: str) -> tuple[str, Item]:
    output = value.get("output")
    if isinstance(output, list):
        texts = [_part(part, f"{param}.output[{index}]") for index, part in enumerate(output)]
        output = [{"type": "input_text", "text": text} for text in texts]
    elif not isinstance(output, str):
        raise InvalidRequest("'output' must be a string or an array of text parts.", param=f"{param}.output")
    return "fco", {"call_id": _string(value, "call_id", param), "output": output}


_READERS = {"message": _message, "function_call": _call, "function_call_output": _call_output}


def said_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A part of what the model said."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _part(value: Any, param: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest("A content part must be an object with a 'type'.", param=param)
    if kind not in _TEXTS:
        raise UnsupportedParameter("This model reads text parts only.", param=f"{param}.type")
    return _string(value, _TEXTS[kind], param)


def _string(value: dict[str, Any], name: str, param: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise InvalidRequest(f"'{name}' must be a string.", param=f"{param}.{name}")
    return found


def _text(part: dict[str, Any]) -> str:
    return str(part["text"])


def _output(output: str | list[dict[str, Any]]) -> str:
    return output if isinstance(output, str) else "".join(_text(part) for part in output)
