"""What compiles, what is refused and how: each source that broke another server, and some that try harder."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from llguidance import LLTokenizer

from schemas.job import Grammar
from services.text.grammar import MAX_SOURCE, BadGrammar, CompiledGrammar, byte_vocabulary, compile_grammar, schema_source
from services.text.grammar_cache import Compiled, GrammarCache
from tests.waiting import until

BYTES = byte_vocabulary()


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value))


def regex(source: str) -> Grammar:
    return Grammar(kind="regex", source=source)


def lark(source: str) -> Grammar:
    return Grammar(kind="grammar", source=source)


def accepts(grammar: Grammar, text: str) -> bool:
    compiled = compile_grammar(grammar, BYTES)
    assert isinstance(compiled, CompiledGrammar), compiled
    matcher = compiled.matcher()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}

ACCEPTED = [
    (Grammar(kind="json_object"), '{"a": [1, {"b": null}]}', "[1]"),
    (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), '{"a": 1}', '{"a": "x"}'),
    (schema({"enum": ["red", 7, None]}), '"red"', '"blue"'),
    (schema({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}), '{"next":{"next":{}}}', '{"next":1}'),
    (schema({"oneOf": [{"type": "string"}, {"type": "null"}]}), "null", "1"),
    (schema({"type": "string", "pattern": "^[a-c]+$"}), '"abc"', '"abd"'),
    (schema({"enum": [f"value {number}" for number in range(5000)]}), '"value 4999"', '"value 5000"'),
    (regex("[0-9]{3}-[0-9]{4}"), "555-0199", "555-019"),
    (regex("(" * 200 + "a" + ")" * 200), "a", "b"),
    (lark('start: "a" start "b" | "c"'), "aacbb", "aacb"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), ACCEPTED)
def test_what_a_grammar_takes(grammar: Grammar, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_blanks_between_json_tokens_are_bounded() -> None:
    assert accepts(Grammar(kind="json_object"), '{\n    "a": 1\n}')
    assert not accepts(Grammar(kind="json_object"), "{" + " " * 33 + '"a": 1}')


def nested(depth: int) -> Grammar:
    return Grammar(kind="json_schema", source='{"properties":{"a":' * depth + "{}" + "}}" * depth)


REFUSED = {
    "a schema that is none": schema({"properties": {"foo": "bar"}}),
    "no such type": schema({"type": "frob"}),
    "not JSON": Grammar(kind="json_schema", source='{"type":'),
    "no JSON text": Grammar(kind="json_schema", source=""),
    "unknown kind": Grammar(kind="xml", source="<a/>"),
    "open parentheses": regex("(" * 10_000),
    "deep parentheses": regex("(" * 10_000 + "a" + ")" * 10_000),
    "open parentheses in a pattern": schema({"type": "string", "pattern": "(" * 10_000}),
    "look-behind": regex("(?<=x)*"),
    "look-behind in a pattern": schema({"type": "string", "pattern": "(?<=x)*"}),
    "deep": nested(1000),
    "deeper": nested(6000),
    "deep grammar": lark("start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "too long": schema({"enum": ["x" * MAX_SOURCE]}),
    "refers to itself": schema({"$ref": "#"}),
    "refers in a circle": schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "refers to nothing": schema({"$ref": "#/$defs/none"}),
    "refers outside": schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "refers to a file": schema({"$ref": "file:///etc/passwd"}),
    "imports a file": lark('%import "/etc/passwd"\nstart: "a"'),
    "no such rule": lark("start: nothing"),
    "unsatisfiable": schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "false": schema(False),
    "not enforceable": schema({"type": "array", "uniqueItems": True}),
    "asks for leniency": schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
    "overlapping oneOf": schema({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}}]}),
    "too many digits": schema({"type": "number", "multipleOf": 1e-300}),
    "grows by multiplication": schema(
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}
    ),
    "too many ways to begin": schema(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {} for i in range(j, j + 20)}} for j in range(150)]}
    ),
    "too many properties": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(2000)}}
    ),
}


@pytest.mark.parametrize("grammar", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_in_words_that_can_be_shown(grammar: Grammar) -> None:
    refused = compile_grammar(grammar, BYTES)
    assert isinstance(refused, BadGrammar)
    assert 5 < len(refused.reason) <= 200
    assert refused.reason.isprintable()
    assert "/rust" not in refused.reason


@pytest.mark.parametrize(
    "source",
    ["((((a{1,100}){1,100}){1,100}){1,100})", "(a|b)*a(a|b){25}x", "(x+x+)+y", "(.*a.{0,500}b)(.*c.{0,500}d)"],
)
def test_a_regex_that_explodes_elsewhere_neither_fails_nor_lasts(source: str) -> None:
    """No time is asserted: the suite's own limit is the bound, and other engines need longer than the universe has."""
    assert isinstance(compile_grammar(regex(source), BYTES), CompiledGrammar)


def test_a_schema_deeper_than_python_can_write_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200_000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested"):
        schema_source(deep)
    while deep:  # else freeing it recurses
        deep = deep.pop("a")


# the cache


class Compiler:
    """Counts, and waits for `gate`."""

    def __init__(self, *, opened: bool = True) -> None:
        self.compiled: list[Grammar] = []
        self.gate = threading.Event()
        if opened:
            self.gate.set()

    def __call__(self, grammar: Grammar, vocabulary: LLTokenizer) -> Compiled:
        self.compiled.append(grammar)
        self.gate.wait(60)
        return compile_grammar(grammar, vocabulary)


async def test_one_compilation_for_all_who_ask() -> None:
    compiler = Compiler()
    cache = GrammarCache(BYTES, compile_=compiler)
    first, second = await asyncio.gather(cache.get(regex("a+")), cache.get(regex("a+")))
    assert first is second is await cache.get(regex("a+"))
    assert await cache.get(regex("b+")) is not first
    assert compiler.compiled == [regex("a+"), regex("b+")]
    cache.close()


async def test_a_budget_ends_the_wait_and_what_took_too_long_is_not_remembered() -> None:
    compiler = Compiler(opened=False)
    cache = GrammarCache(BYTES, budget_s=1.0, compile_=compiler)
    assert await cache.get(regex("a+")) == BadGrammar("it takes too long to compile")
    compiler.gate.set()
    assert isinstance(await cache.get(regex("a+")), CompiledGrammar)
    cache.close()


async def test_what_is_remembered_is_bounded() -> None:
    cache = GrammarCache(BYTES)
    first = await cache.get(Grammar(kind="json_object", source="0" * 60_000))
    for number in range(1, 20):
        await cache.get(Grammar(kind="json_object", source=f"{number}" * 60_000))
    assert await cache.get(Grammar(kind="json_object", source="0" * 60_000)) is not first
    cache.close()


async def test_closing_leaves_what_runs_to_end() -> None:
    compiler = Compiler(opened=False)
    cache = GrammarCache(BYTES, compile_=compiler)
    waiting = cache.start(regex("a+"))
    await until(lambda: compiler.compiled, what="the compilation")
    cache.close()
    compiler.gate.set()
    assert isinstance(await waiting, CompiledGrammar)
