"""Calls that keep to their schemas, whatever the schemas are made of; and free text beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.job import Grammar
from services.text.grammar import BadGrammar, CompiledGrammar, byte_vocabulary, compile_grammar
from services.text.tools.grammar import HERMES, LLAMA3, CallSyntax, Function, calls, calls_or_text

BYTES = byte_vocabulary()
CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
BY_NAME = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "$defs": {"City": CITY}}
"""As pydantic writes a model within a model."""
LIST = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
SYNTAXES = [pytest.param(HERMES, id="hermes"), pytest.param(LLAMA3, id="llama3")]


def takes(grammar: Grammar, text: str) -> bool:
    compiled = compile_grammar(grammar, BYTES)
    assert isinstance(compiled, CompiledGrammar), compiled
    matcher = compiled.matcher()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def call(syntax: CallSyntax, name: str, arguments: Any, **written: Any) -> str:
    return syntax.opens + json.dumps({"name": name, syntax.arguments: arguments}, **written) + syntax.closes


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_references_in_a_schema_are_to_the_schema_itself(syntax: CallSyntax) -> None:
    """Also among several functions, each with definitions of its own."""
    functions = [Function("by_name", "", BY_NAME), Function("walk", "", LIST), Function("other")]
    for grammar in (calls(syntax, functions, several=True), calls_or_text(syntax, functions, several=True, content=None)):
        good = call(syntax, "by_name", {"city": {"name": "Paris"}})
        nested = call(syntax, "walk", {"value": 1, "next": {"value": 2, "next": None}})
        assert takes(grammar, good)
        assert takes(grammar, nested)
        assert takes(grammar, good + syntax.between + nested)
        assert not takes(grammar, call(syntax, "by_name", {"city": {"name": 5}}))
        assert not takes(grammar, call(syntax, "walk", {"value": 1, "next": {"name": "walk", syntax.arguments: {}}}))
        assert not takes(grammar, call(syntax, "unknown", {}))


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("written", [{"separators": (",", ":")}, {"indent": 2}, {}], ids=["tight", "lines", "usual"])
def test_blanks_are_the_models_own_affair_within_bounds(syntax: CallSyntax, written: dict[str, Any]) -> None:
    grammar = calls(syntax, [Function("walk", "", LIST)], several=False)
    text = call(syntax, "walk", {"value": 1, "next": None}, **written)
    assert takes(grammar, text)
    for place in (text.index("{") + 1, text.index('"value"')):
        assert not takes(grammar, text[:place] + " " * 40 + text[place:])


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}, {"type": ["object", "null"]}])
def test_arguments_are_an_object(parameters: dict[str, Any] | None) -> None:
    grammar = calls(HERMES, [Function("f", "", parameters)], several=False)
    assert takes(grammar, call(HERMES, "f", {}))
    for other in (5, "x", None, []):
        assert not takes(grammar, call(HERMES, "f", other))


def test_a_schema_of_anything_else_is_none() -> None:
    for kind in ("string", "array", ["null"], 5):
        with pytest.raises(ValueError, match="object"):
            calls(HERMES, [Function("f", "", {"type": kind})], several=False)


REFUSED: list[dict[str, Any]] = [
    {"properties": {"a": {"$ref": "#/$defs/none"}}},
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"not": {"required": ["a"]}, "x-guidance": {"lenient": True}},
    {"required": ["a"], "additionalProperties": False},
]


@pytest.mark.parametrize("parameters", REFUSED)
def test_what_cannot_be_kept_to_is_refused_also_among_others(parameters: dict[str, Any]) -> None:
    functions = [Function("f", "", CITY), Function("g", "", {"type": "object", **parameters}, strict=True)]
    assert isinstance(compile_grammar(calls(HERMES, functions, several=True), BYTES), BadGrammar)


UNENFORCEABLE: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "string", "format": "int32"},
    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    {"type": "array", "items": {"type": "string", "pattern": "(?<=a)b"}},
    {"type": "string", "pattern": r"^\bx\b"},
    {"type": "string", "pattern": r"^(\d)\1$"},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 9}]},
    {"anyOf": [{"type": "string", "not": {"const": "x"}}, {"type": "array", "contains": {}}]},
]
"""Of a property whose value is a string or an array."""


@pytest.mark.parametrize("schema", UNENFORCEABLE, ids=lambda schema: str(list(schema)[-1]))
def test_a_function_that_is_not_strict_is_kept_to_what_can_be(schema: dict[str, Any]) -> None:
    """Schemas made from types hold such keywords: OpenAI's takes them where a function is not strict."""
    parameters = {"properties": {"pattern": schema}, "required": ["pattern"], "additionalProperties": False}
    grammar = calls(HERMES, [Function("f", "", parameters), Function("g", "", LIST, strict=True)], several=False)
    assert any(takes(grammar, call(HERMES, "f", {"pattern": value})) for value in ("1.5", ["1.5"]))
    for wrong in ({"pattern": 5}, {"other": "1.5"}, {}):
        assert not takes(grammar, call(HERMES, "f", wrong))
    strict = calls(HERMES, [Function("f", "", parameters, strict=True)], several=False)
    assert isinstance(compile_grammar(strict, BYTES), BadGrammar)


@pytest.mark.parametrize("pattern", [r"^(?=x)", r"^(?!n_)", r"^x\b", r"^(.)\1$"])
def test_names_by_a_pattern_that_cannot_be_followed(pattern: str) -> None:
    """Any name may be one of them, unless the schema tells by itself what the name has."""
    typed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    parameters = {"properties": {"of": {**typed, "patternProperties": {pattern: {"type": "string"}, "^n_": {"type": "integer"}}}}}
    grammar = calls(HERMES, [Function("f", "", parameters)], several=False)
    for good in ({"a": 1, "xx": "s"}, {"a": 1, "n_b": 2}):
        assert takes(grammar, call(HERMES, "f", {"of": good}))
    for wrong in ({"a": "s"}, {"xx": "s"}, {"a": 1, "n_b": "s"}):
        assert not takes(grammar, call(HERMES, "f", {"of": wrong}))
    strict = calls(HERMES, [Function("f", "", parameters, strict=True)], several=False)
    assert isinstance(compile_grammar(strict, BYTES), BadGrammar)


def test_text_that_begins_as_a_call_is_one() -> None:
    """The parser takes blanks before the brace for nothing, so a text may not begin so either."""
    grammar = calls_or_text(LLAMA3, [Function("walk", "", LIST, strict=True)], several=True, content=None)
    assert takes(grammar, "\n Well, {")
    assert not takes(grammar, '\n {"name": "walk", "parameters": {}}')


def test_beside_a_response_format_with_definitions() -> None:
    functions = [Function("walk", "", LIST, strict=True)]
    grammar = calls_or_text(HERMES, functions, several=True, content=BY_NAME)
    assert takes(grammar, call(HERMES, "walk", {"value": 1, "next": None}))
    assert takes(grammar, '{"city": {"name": "Paris"}}')
    assert not takes(grammar, '{"city": {"name": 5}}')
