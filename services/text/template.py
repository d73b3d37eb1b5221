"""A model's chat template: messages → the text the model was trained to see.

Owns the Jinja sandbox. Templates come with the model, never with a request; a request may set variables that a template knows
beside what it is always given, and then what is written is bounded. What a template sees (filters, globals, white space rules) is
what Hugging Face gives it, or it would render something else than it was written for.
Source: transformers `utils/chat_template_utils.py`; the OpenAI chat message format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from schemas.errors import InvalidRequest
from services.clock import Clock
from services.text.assets import TextAssets, TextError
from services.text.tools.formats import tool_format

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_LONGEST = 2**24
"""Characters that a request's variables may make a template write."""
Message = Mapping[str, Any]
"""`role`, `content` (a string, text parts, or None) and whatever else the template may know."""


class ChatTemplate:
    """Raises `TextError` when `assets` hold no template, or one that is no valid Jinja."""

    def __init__(self, assets: TextAssets, clock: Clock) -> None:
        if assets.chat_template is None:
            raise TextError("this model has no chat template; use a model that is made for chat")
        environment = _environment(clock)
        try:
            self._template = environment.from_string(assets.chat_template)
        except jinja2.TemplateError as error:
            raise TextError(f"the model's chat template is not valid: {error}") from None
        self._given = {"documents": None, "add_generation_prompt": True, **assets.special_tokens}
        self._taken = frozenset({"messages", "tools", *self._given, *environment.globals})
        self._knows_developer = "developer" in assets.chat_template
        self.knows_tools = "tools" in assets.chat_template
        self.tool_format = tool_format(assets.chat_template)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """The prompt text, open for the assistant's turn. `messages` as `plain_messages` gives them; `tools` as OpenAI has them,
        for a template that knows them; `variables`: others that the template may know, from the request.

        Raises `InvalidRequest` when the template refuses the messages or cannot handle them, or a variable's name is not free.
        """
        if taken := self._taken.intersection(variables):
            param = f"chat_template_kwargs.{min(taken)}"
            raise InvalidRequest(f"'{param}' would replace what the template is given.", param=param)
        known = [self._known_role(message) for message in messages]
        given = {**self._given, "messages": known, "tools": list(tools) or None}
        try:
            if not variables:
                return self._template.render(given)
            return _bounded(self._template.generate({**given, **variables, "range": _Ranges()}))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"The model's chat template cannot render these messages: {error}"
            raise InvalidRequest(message, param="messages") from None

    def _known_role(self, message: Message) -> dict[str, Any]:
        """OpenAI's newer name for system instructions, for templates that are older than it."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)


class _Ranges:
    """`range` for one rendering whose numbers are a request's: all together no longer than the sandbox lets one of them be."""

    def __init__(self) -> None:
        self._left = MAX_RANGE

    def __call__(self, *bounds: int) -> range:
        made = range(*bounds)
        self._left -= len(made)
        if self._left < 0:
            raise OverflowError(f"its ranges are longer than {MAX_RANGE}")
        return made


def _bounded(pieces: Iterable[str]) -> str:
    written, size = [], 0
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > _LONGEST:
            raise OverflowError(f"it writes more than {_LONGEST} characters")
    return "".join(written)


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
