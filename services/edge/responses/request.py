"""The body of `POST /v1/responses`, checked: shapes, ranges, and what cannot be honoured, by name.

Tools and formats are spelled differently here than in a chat; they are read by the chat's own rules, whose refusals are told in
the words of this endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from schemas.errors import InvalidRequest, UnsupportedParameter
from schemas.job import Grammar
from services.edge.api import document
from services.edge.api.request import GenerationRequest
from services.edge.api.response_format import read_response_format
from services.edge.api.tools import Tools, read_tools

_MOST_PAIRS = 16


def _few(value: Any) -> Any:
    """Counted before each of very many is looked at."""
    if isinstance(value, dict) and len(value) > _MOST_PAIRS:
        raise InvalidRequest(f"'metadata' may hold at most {_MOST_PAIRS} pairs.", param="metadata")
    return value


_Pairs = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
Metadata = Annotated[_Pairs, BeforeValidator(_few), Field(max_length=_MOST_PAIRS)]
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""No model here reasons apart from its answer: of reasoning there is nothing to include."""
_NO_REASONING = (("effort", "none"),)
_RENAMED = (("response_format.json_schema", "text.format"), ("response_format", "text.format"), (".function", ""))


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    input: Annotated[Any, document.INPUT] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[Any, document.CONVERSATION] = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, document.TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def alternatives(self) -> int | None:
        asked = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def conversation_id(self) -> str | None:
        """Raises `InvalidRequest`."""
        match self.conversation:
            case None:
                return None
            case str(name) | {"id": str(name)}:
                return name
        raise InvalidRequest("'conversation' must be the id of a conversation.", param="conversation")


def check(asked: ResponsesRequest, *, follows_grammars: bool) -> None:
    """Raises `InvalidRequest`, `UnsupportedParameter` for the first field that is wrong or would have to be ignored."""
    if asked.background and not asked.stored:
        raise InvalidRequest("A background response has to be stored.", param="background")
    for name, wanted in _unsupported(asked, follows_grammars).items():
        if wanted:
            raise UnsupportedParameter(f"'{name}' is not supported.", param=name)
    if asked.truncation not in (None, "disabled"):
        raise InvalidRequest("'truncation' must be 'disabled'.", param="truncation")


def read_functions(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """`read_tools` of tools as they are spelled here. Raises `InvalidRequest`."""
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    with _in_our_words():
        return read_tools([_as_in_chat(tool) for tool in tools or ()], choice, parallel)


def read_format(asked: ResponsesRequest) -> Grammar | None:
    """Of `text.format`; None for plain text. Raises `InvalidRequest`."""
    found = (asked.text or {}).get("format")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise InvalidRequest("'text.format' must be an object.", param="text.format")
    if found.get("type") == "json_schema":
        found = {"type": "json_schema", "json_schema": found}
    with _in_our_words():
        return read_response_format(found)


def _unsupported(asked: ResponsesRequest, follows_grammars: bool) -> dict[str, bool]:
    return {
        "n": (asked.n or 1) > 1,
        "stop": asked.stop is not None,
        "response_format": asked.response_format is not None,
        "max_tokens": asked.max_tokens is not None,
        "prompt_logprobs": asked.prompt_logprobs is not None,
        "truncation": asked.truncation == "auto",
        "include": any(name not in _INCLUDED for name in asked.include or ()),
        "reasoning": any(told not in _NO_REASONING for told in (asked.reasoning or {}).items() if told[1] is not None),
        "text.verbosity": (asked.text or {}).get("verbosity") not in (None, "medium"),
        "tool_choice": asked.tool_choice not in (None, "none", "auto") and not follows_grammars,
        "max_tool_calls": asked.max_tool_calls is not None,
        "prompt": asked.prompt is not None,
        "context_management": asked.context_management is not None,
        "moderation": asked.moderation is not None,
    }


def _as_in_chat(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


@contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(_renamed(error.message), param=_renamed(error.param or "") or None) from None


def _renamed(text: str) -> str:
    for theirs, ours in _RENAMED:
        text = text.replace(theirs, ours)
    return text
