"""Tools → the grammar that a model's calls must keep to, in llguidance's Lark. Pure functions.

Two uses: calls that must come (`tool_choice` required, or one function by name), and calls that may come, whose arguments keep to
their schema (`strict`), beside free text or a response format. A call that must come, of a function that is not strict, keeps to
what of its schema can be enforced, as OpenAI's does its best. Source of the syntax: llguidance, docs/syntax.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.job import Grammar
from services.text.grammar import BLANK, schema_source
from services.text.tools.hermes import CLOSE, OPEN

_BEYOND = re.compile(r"\(\?<?[=!]|\(\?P=|\\[bBk1-9]")
"""In a pattern: what no automaton can follow, which looks around, at a word's boundary or back. Pydantic does for a decimal."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters`: its JSON schema; `strict`: arguments are promised to keep to it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def fields(self) -> dict[str, Any]:
        """As chat templates know it."""
        about: dict[str, Any] = {"name": self.name, "description": self.description}
        return {"type": "function", "function": about | {"parameters": self.parameters or {"type": "object", "properties": {}}}}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes a call: what opens and closes it, what stands between two, what it calls the arguments."""

    opens: str
    closes: str
    between: str
    arguments: str


HERMES = CallSyntax(f"{OPEN}\n", f"\n{CLOSE}", "\n", "arguments")
LLAMA3 = CallSyntax("", "", "; ", "parameters")


def calls(syntax: CallSyntax, functions: Sequence[Function], *, several: bool) -> Grammar:
    """An answer that is one call of one of `functions`, or one after another. Raises ValueError for a schema that is no JSON."""
    return Grammar(kind="grammar", source=f"start: calls\n{_calls(syntax, functions, several)}")


def calls_or_text(syntax: CallSyntax, functions: Sequence[Function], *, several: bool, content: dict[str, Any] | None) -> Grammar:
    """An answer that may call, and then keeps to the schemas. `content`: JSON schema of any other answer, None = free text.

    Raises ValueError.
    """
    if content is not None:
        start = f"start: calls | content\ncontent: %json {_bounded(content)}\n"
    elif syntax.opens:
        tag = syntax.opens.rstrip()
        start = f"start: TEXT* calls?\nTEXT: /[^{tag[0]}]+/ | /{_beginnings(tag)}/\n"
    else:
        start = "start: calls | TEXT?\nTEXT: /[ \\t\\r\\n]*[^{ \\t\\r\\n](.|\\n)*/\n"
    return Grammar(kind="grammar", source=start + _calls(syntax, functions, several))


def _calls(syntax: CallSyntax, functions: Sequence[Function], several: bool) -> str:
    more = f" ({_quoted(syntax.between)} call)*" if several else ""
    around = [_quoted(part) for part in (syntax.opens, syntax.closes) if part]
    call = " body ".join(around) if around else "body"
    bodies = " | ".join(f"body_{place}" for place in range(len(functions)))
    rules = [f"calls: call{more}", f"call: {call}", f"body: {bodies}", f"BLANK: /{BLANK}/"]
    return "\n".join([*rules, *(_body(syntax, function, place) for place, function in enumerate(functions))]) + "\n"


def _body(syntax: CallSyntax, function: Function, place: int) -> str:
    """The schema is a document of its own, so that `#/$defs/…` in it means what its author meant."""
    parts = ["{", '"name"', ":", f'"{function.name}"', ",", f'"{syntax.arguments}"', ":"]
    head = " BLANK? ".join(_quoted(part) for part in parts)
    parameters = _of_object(function.parameters or {})
    schema = _bounded(parameters) if function.strict else _bounded(_followed(parameters), lenient=True)
    return f'body_{place}: {head} BLANK? arguments_{place} BLANK? "}}"\narguments_{place}: %json {schema}'


def _of_object(parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether or not their schema says so. Raises ValueError when it says another thing."""
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError("their type is not 'object'")
    return {**parameters, "type": "object"}


def _followed(schema: Any) -> Any:
    """Without the patterns that cannot be followed; `lenient` passes over the keywords that cannot."""
    if isinstance(schema, list):
        return [_followed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    followed = {
        key: _followed(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str) and _BEYOND.search(value))
    }
    named = followed.get("patternProperties")
    if isinstance(named, dict) and any(_BEYOND.search(pattern) for pattern in named):
        followed["patternProperties"] = {pattern: value for pattern, value in named.items() if not _BEYOND.search(pattern)}
        followed.pop("additionalProperties", None)  # it was said of other names than those of the pattern
    return followed


def _bounded(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """Its author has no say in how strictly it is read. Raises ValueError."""
    return schema_source({**schema, "x-guidance": {"whitespace_pattern": BLANK, "lenient": lenient}})


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _beginnings(tag: str) -> str:
    """A regular expression for each proper beginning of `tag`: text that looked like one for a while."""
    nested = ""
    for character in reversed(tag[1:-1]):
        nested = f"({character}{nested})?"
    return tag[0] + nested
