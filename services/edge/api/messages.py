"""Chat messages of a request, checked: role, content, and what goes with them. Images and audio are refused by name.

Keeps each message as the client wrote it, for the chat template; null and absent mean the same.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import EmptyArray, InvalidRequest, UnsupportedParameter

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_CALL = _MAY_BE_EMPTY = "assistant"
_UNREAD = ("function_call", "audio")
"""Of an assistant's answer: what the model would never see."""


def check_messages(value: Any) -> list[dict[str, Any]]:
    """The messages, without their null fields. Raises `InvalidRequest` that names the place."""
    if not isinstance(value, list):
        raise InvalidRequest("'messages' must be an array of messages.", param="messages")
    if not value:
        raise EmptyArray("'messages' must hold at least one message.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest("A message must be an object.", param=param)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"'role' must be one of {', '.join(ROLES)}.", param=f"{param}.role")
    message = {key: item for key, item in value.items() if item is not None}
    unread = next((name for name in _UNREAD if name in message), None)
    if unread is not None:
        raise UnsupportedParameter(f"'{unread}' of a message is not supported.", param=f"{param}.{unread}")
    if "name" in message and not isinstance(message["name"], str):
        raise InvalidRequest("'name' must be a string.", param=f"{param}.name")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequest("'tool_call_id' must be a string.", param=f"{param}.tool_call_id")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], role, f"{param}.tool_calls")
    if role == _MAY_BE_EMPTY and isinstance(message.get("refusal"), str):
        message.setdefault("content", message["refusal"])
    if "content" in message:
        message["content"] = _content(message["content"], f"{param}.content")
    elif role != _MAY_BE_EMPTY:
        raise InvalidRequest("'content' must be a string or an array of text parts.", param=f"{param}.content")
    return message


def _calls(value: Any, role: str, param: str) -> list[dict[str, Any]]:
    if role != _MAY_CALL:
        raise InvalidRequest("Only an assistant's message may hold 'tool_calls'.", param=param)
    if not isinstance(value, list):
        raise InvalidRequest("'tool_calls' must be an array.", param=param)
    return [_call(call, f"{param}[{index}]") for index, call in enumerate(value)]


def _call(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise InvalidRequest("A tool call must be an object of type 'function'.", param=param)
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("A tool call must name its function.", param=f"{param}.function.name")
    if not isinstance(function.get("arguments"), str):
        raise InvalidRequest("'arguments' must be a string that holds JSON.", param=f"{param}.function.arguments")
    return {"type": "function", **value}


def _content(value: Any, param: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("'content' must be a string or an array of text parts.", param=param)
    if not value:
        raise EmptyArray("'content' must hold at least one part.", param=param)
    return [_part(part, f"{param}[{index}]") for index, part in enumerate(value)]


def _part(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequest("A content part must be an object with a 'type'.", param=param)
    if value["type"] not in ("text", "refusal"):
        raise UnsupportedParameter("This model reads text parts only.", param=f"{param}.type")
    text = value.get(value["type"])
    if not isinstance(text, str):
        raise InvalidRequest(f"'{value['type']}' must be a string.", param=f"{param}.{value['type']}")
    return {"type": "text", "text": text}
