"""Messages with tools, for the chat template: as it knows them, or in plain words for one that knows no tools.

Pure functions over messages that were checked. A template gets objects for arguments, as Hugging Face's templates expect;
OpenAI's API carries them as text. The plain words are those of Qwen2.5's template, which is Hermes' format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.text.nesting import too_deep
from services.text.tools.grammar import Function
from services.text.tools.hermes import CLOSE, OPEN

_ASK = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each call's arguments an object, where they are one."""
    return [dict(message) | _calls(message) for message in messages]


def in_plain_words(messages: Sequence[Mapping[str, Any]], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The functions in the system message, calls and their results as text. Contents must be strings by now."""
    plain = [_plain(message) for message in messages]
    if not functions:
        return plain
    listed = "\n".join(json.dumps(function.fields(), ensure_ascii=False) for function in functions)
    asked = _ASK.format(tools=listed, open=OPEN, close=CLOSE)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{asked}"}, *plain[1:]]
    return [{"role": "system", "content": asked}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [f"{OPEN}\n{json.dumps(_named(call['function']), ensure_ascii=False)}\n{CLOSE}" for call in calls]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _named(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": _parsed(function["arguments"])}


def _calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {}
    return {"tool_calls": [call | {"function": call["function"] | _named(call["function"])} for call in calls]}


def _parsed(arguments: Any) -> Any:
    """As the caller wrote them when they are no JSON: the model may have, too. Nothing at all stands for no arguments."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        return arguments
    return arguments if too_deep(parsed) else parsed
