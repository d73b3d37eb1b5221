"""`tools`, `tool_choice`, `parallel_tool_calls` of a chat request → what may be called, and what must be. Shapes only; pure.

Source: the OpenAI API reference, "Create chat completion". Null and an empty list of tools are the same as absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest, UnsupportedParameter
from schemas.job import Grammar
from services.edge.api.names import read_name
from services.text.tools.grammar import CallSyntax, Function, calls, calls_or_text

_MOST = 128


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions`: what may be called. `must`: an answer without a call is none. `named`: the request named the one function.
    `several`: calls an answer may hold."""

    functions: tuple[Function, ...]
    must: bool = False
    named: bool = False
    several: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def grammar(self, syntax: CallSyntax, content: Grammar | None) -> Grammar | None:
        """What the answer has to keep to, `content` being its response format; None: nothing. Raises `InvalidRequest`."""
        try:
            if self.must:
                return calls(syntax, self.functions, several=self.several and not self.named)
            if content is None and not any(function.strict for function in self.functions):
                return None
            promised = [function if function.strict else Function(function.name) for function in self.functions]
            return calls_or_text(syntax, promised, several=self.several, content=_schema(content))
        except ValueError as error:
            raise InvalidRequest(f"A function's 'parameters' cannot be used: {error}.", param="tools") from None


def read_tools(tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None) -> Tools | None:
    """Of `tools`, `tool_choice`, `parallel_tool_calls`. None when nothing may be called.

    Raises `InvalidRequest` that names the place.
    """
    functions = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    if len(functions) > _MOST:
        raise InvalidRequest(f"'tools' may hold at most {_MOST} functions.", param="tools")
    if len({function.name for function in functions}) < len(functions):
        raise InvalidRequest("Two of the functions in 'tools' have the same name.", param="tools")
    several = parallel is not False
    match choice:
        case None | "auto":
            return Tools(functions, several=several) if functions else None
        case "none":
            return None
        case "required":
            return Tools(_some(functions), must=True, several=several)
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = tuple(function for function in _some(functions) if function.name == name)
            if not chosen:
                raise InvalidRequest(f"'tool_choice' names {name[:64]!r}, which is not in 'tools'.", param="tool_choice")
            return Tools(chosen, must=True, named=True, several=False)
    raise InvalidRequest("'tool_choice' must be 'none', 'auto', 'required' or name a function.", param="tool_choice")


def _some(functions: tuple[Function, ...]) -> tuple[Function, ...]:
    if not functions:
        raise InvalidRequest("'tool_choice' asks for a call, and there are no 'tools'.", param="tool_choice")
    return functions


def _function(tool: Any, param: str) -> Function:
    if not isinstance(tool, dict):
        raise InvalidRequest("A tool must be an object.", param=param)
    if tool.get("type") != "function":
        raise UnsupportedParameter("Only tools of type 'function' are supported.", param=f"{param}.type")
    about, at = tool.get("function"), f"{param}.function"
    if not isinstance(about, dict):
        raise InvalidRequest(f"'{at}' must be an object.", param=at)
    return Function(
        read_name(about, at),
        _typed(about, "description", str, at) or "",
        _typed(about, "parameters", dict, at),
        _typed(about, "strict", bool, at) or False,
    )


_WORDS = {str: "a string", dict: "an object", bool: "a boolean"}


def _typed(about: dict[str, Any], name: str, kind: type, at: str) -> Any:
    value = about.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"'{at}.{name}' must be {_WORDS[kind]}.", param=f"{at}.{name}")
    return value


def _schema(content: Grammar | None) -> dict[str, Any] | None:
    """A response format beside tools. Raises `InvalidRequest` for the kinds that are no JSON."""
    if content is None:
        return None
    match content.kind:
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            return dict(json.loads(content.source))
    raise InvalidRequest("This 'response_format' cannot be combined with 'tools'.", param="response_format")
