"""A model's chat template: messages → the text the model was trained to see.

Owns the Jinja sandbox. Templates come with the model, never with a request. What a template sees (filters, globals, white
space rules) is what Hugging Face gives it, or it would render something else than it was written for.
Source: transformers `utils/chat_template_utils.py`; the OpenAI chat message format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import InvalidRequest
from services.clock import Clock
from services.text.assets import TextAssets, TextError
from services.text.tools.formats import tool_format

Message = Mapping[str, Any]
"""`role`, `content` (a string, text parts, or None) and whatever else the template may know."""


class ChatTemplate:
    """Raises `TextError` when `assets` hold no template, or one that is no valid Jinja."""

    def __init__(self, assets: TextAssets, clock: Clock) -> None:
        if assets.chat_template is None:
            raise TextError("this model has no chat template; use a model that is made for chat")
        try:
            self._template = _environment(clock).from_string(assets.chat_template)
        except jinja2.TemplateError as error:
            raise TextError(f"the model's chat template is not valid: {error}") from None
        self._special_tokens = assets.special_tokens
        self._knows_developer = "developer" in assets.chat_template
        self.knows_tools = "tools" in assets.chat_template
        self.tool_format = tool_format(assets.chat_template)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt text, open for the assistant's turn. `messages` as `plain_messages` gives them; `tools` as OpenAI has them,
        for a template that knows them.

        Raises `InvalidRequest` when the template refuses the messages or cannot handle them.
        """
        try:
            return self._template.render(
                messages=[self._known_role(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"The model's chat template cannot render these messages: {error}"
            raise InvalidRequest(message, param="messages") from None

    def _known_role(self, message: Message) -> dict[str, Any]:
        """OpenAI's newer name for system instructions, for templates that are older than it."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """`messages` with every content a string: text parts joined by a line break, None as the empty string.

    Raises `InvalidRequest` for a part that is not text.
    """
    return [
        {**message, "content": _plain_content(message.get("content"), f"messages[{index}].content")}
        for index, message in enumerate(messages)
    ]


def _plain_content(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest("Message content must be a string or an array of text parts.", param=param)
    return "\n".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("This model reads text parts only.", param=param)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(clock.wall()).strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
