"""Chat messages of a request, checked: role, content, and what goes with them. Images and audio are refused by name.

Keeps each message as the client wrote it, for the chat template; null and absent mean the same.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import EmptyArray, InvalidRequest, UnsupportedParameter

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_EMPTY = "assistant"


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
    if "name" in message and not isinstance(message["name"], str):
        raise InvalidRequest("'name' must be a string.", param=f"{param}.name")
    if "content" in message:
        message["content"] = _content(message["content"], f"{param}.content")
    elif role != _MAY_BE_EMPTY:
        raise InvalidRequest("'content' must be a string or an array of text parts.", param=f"{param}.content")
    return message


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
