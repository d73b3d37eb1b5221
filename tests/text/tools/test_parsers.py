"""Calls found in text, whole and in pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text.tools.formats import tool_format
from services.text.tools.hermes import HermesParser
from services.text.tools.llama3 import Llama3Parser
from services.text.tools.parser import Arguments, CallBegins, CallEnds, Content, Event, ToolParser

Read = tuple[str, list[tuple[str, str, bool]]]
"""Content, and calls as (name, arguments, whole)."""


def joined(events: list[Event]) -> Read:
    content, calls = "", list[tuple[str, str, bool]]()
    for event in events:
        match event:
            case Content():
                content += event.text
            case CallBegins():
                calls.append((event.name, "", False))
            case Arguments():
                name, arguments, whole = calls[-1]
                assert not whole
                calls[-1] = (name, arguments + event.text, False)
            case CallEnds():
                calls[-1] = (calls[-1][0], calls[-1][1], True)
    return content, calls


def read(parser: ToolParser, *texts: str) -> Read:
    return joined([event for text in texts for event in parser.push(text)] + parser.finish())


def call(name: str = "f", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = ("f", '{"a": 1}', True)
NONE = ("f", "{}", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", ("plain text", [])),
        (call(), ("", [ONE])),
        (f"I look.\n\n{call()}", ("I look.", [ONE])),
        (f"{call()}\n{call('g', '{}')}", ("", [ONE, ("g", "{}", True)])),
        (f"{call()} and more ", (("and more ", [ONE]))),
        (f"{call()}\nthen\n{call()}\n", ("then", [ONE, ONE])),
        (call(arguments='{"a": "}{\\"<tool_call>"}'), ("", [("f", '{"a": "}{\\"<tool_call>"}', True)])),
        (call(arguments='{"a": {"b": [1, {"c": 2}]}}'), ("", [("f", '{"a": {"b": [1, {"c": 2}]}}', True)])),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [ONE])),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", [ONE])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}", True)])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [ONE])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": [3]}}\n</tool_call> ', ("", [ONE])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", [ONE])),
        ('<tool_call>{"name": "f", "arguments": {"a":', ("", [("f", '{"a":', False)])),
        ("a <tool_cal", ("a <tool_cal", [])),
        ("a < b <t> </tool_call>\n", ("a < b <t> </tool_call>\n", [])),
        ("a \n<tool_call>\nno object", ("a \n<tool_call>\nno object", [])),
        ('x <tool_call> {"nam', ('x <tool_call> {"nam', [])),
        ('x <tool_call> {"no": "call"} y', ('x <tool_call> {"no": "call"} y', [])),
        ('<tool_call>{"name": 5, "arguments": {}}z', ('<tool_call>{"name": 5, "arguments": {}}z', [])),
        ('<tool_call>{"name": "f", "arguments": [1]}z', ('<tool_call>{"name": "f", "arguments": [1]}z', [])),
        ('<tool_call>{"name": "\\q", "arguments": {}}z', ('<tool_call>{"name": "\\q", "arguments": {}}z', [])),
        (f"<tool_call>\n{call()}", ("<tool_call>\n", [ONE])),
        *(
            (f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>', ("", [NONE]))
            for none in ("null", '""', '" "', '"{}"')
        ),
        (
            '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
            ('<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', []),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so', ("so", [ONE])),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}</tool_call>\n{call()}', ("", [ONE, ONE])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', ("so", [("f", '{"a": 1', True)])),
        (
            '<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>',
            ('<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>', []),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {"a": 1}}</tool_call>.', (".", [ONE, ONE])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}{"b": 2}</tool_call>', ('{"b": 2}</tool_call>', [ONE])),
        ('<tool_call>{"arguments": {"a": "b\nc"}, "name": "f"}</tool_call>', ("", [("f", '{"a": "b\\nc"}', True)])),
        ('<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>', ("", [("f", '{"a": "é"}', True)])),
        ('<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', ("", [("f", '{"a": "\\ud800"}', True)])),
        *(
            (f"<tool_call>{odd}</tool_call>", (f"<tool_call>{odd}</tool_call>", []))
            for odd in (
                '{"arguments": {"a": NaN}, "name": "f"}',
                '{"arguments": {"a": 1e999}, "name": "f"}',
                '{"name": "\\ud800", "arguments": {}}',
                '{"name": "f g", "arguments": {}}',
                "{'name': 'f', 'arguments': {}}",
            )
        ),
    ],
)
def test_hermes(text: str, expected: Read) -> None:
    assert read(HermesParser(), text) == expected
    assert read(HermesParser(), *text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", [])),
        ("  plain { }", ("  plain { }", [])),
        ('{"name": "f", "parameters": {"a": 1}}', ("", [ONE])),
        (' \n{"name": "f", "parameters": {"a": 1}}\n', ("", [ONE])),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', ("", [ONE, ("g", "{}", True)])),
        ('{"name": "f", "parameters": {"a": 1}} so', ("so", [ONE])),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", [ONE])),
        (' {"name": "unknown", "parameters": {}} x', (' {"name": "unknown", "parameters": {}} x', [])),
        ('{"answer": 42}', ('{"answer": 42}', [])),
        (' {"answer": 4', (' {"answer": 4', [])),
        ('{"name": "f", "parameters": {"a"', ("", [("f", '{"a"', False)])),
        ('{"name": "f", "parameters": null}', ("", [NONE])),
        ('{"name": "f", "parameters": {"a": 1}},\n{"name": "f", "parameters": {"a": 1}}', ("", [ONE, ONE])),
        ('{"name": "f", "parameters": {"a": 1}; {"name": "f", "parameters": {"a": 1}}', ("", [ONE, ONE])),
        ("{ if (a < b) { f(); } }", ("{ if (a < b) { f(); } }", [])),
        ('\xa0{"name": "f", "parameters": {}}', ('\xa0{"name": "f", "parameters": {}}', [])),
    ],
)
def test_llama3(text: str, expected: Read) -> None:
    assert read(Llama3Parser({"f", "g"}), text) == expected
    assert read(Llama3Parser({"f", "g"}), *text) == expected


_PIECES = ["<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "{", "}", '"', "\\", ":", ",", "[", "]", "x", "é", ";"]
_PIECES += ['{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": 1}}', '{"a": 1}', '"name"', call(), "1"]
texts = st.lists(st.sampled_from(_PIECES), max_size=12).map("".join)


@given(text=texts, cuts=st.sets(st.integers(0, 200), max_size=8), llama=st.booleans())
def test_how_the_text_is_cut_changes_nothing(text: str, cuts: set[int], llama: bool) -> None:
    def parser() -> ToolParser:
        return Llama3Parser({"f"}) if llama else HermesParser()

    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(at)]
    assert read(parser(), *pieces) == read(parser(), text)


@given(text=texts)
def test_without_a_call_nothing_is_lost(text: str) -> None:
    content, calls = read(HermesParser(), text)
    assert calls or content == text


@given(
    arguments=st.dictionaries(
        st.text(max_size=5), st.text(max_size=8) | st.integers() | st.lists(st.text(max_size=3)), max_size=4
    )
)
def test_arguments_arrive_as_they_were_written(arguments: dict[str, object]) -> None:
    spelled = json.dumps(arguments)
    assert read(HermesParser(), *call(arguments=spelled)) == ("", [("f", spelled, True)])


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesParser()
    parser.push('<tool_call>\n{"name": "f", "arguments": {"city": "Par')
    assert parser.push("is") == [Arguments("is")]


def test_text_is_not_held_back_without_need() -> None:
    parser = HermesParser()
    assert parser.push("hello wor") == [Content("hello wor")]
    assert parser.push("ld <") == [Content("ld")]
    assert parser.push("b>") == [Content(" <b>")]


def test_the_template_tells_the_format() -> None:
    assert isinstance(tool_format("{{ '<tool_call>' }}").parser(()), HermesParser)
    assert isinstance(tool_format("{{ '<|python_tag|>' }}").parser(()), Llama3Parser)
    assert isinstance(tool_format("{{ messages }}").parser(()), HermesParser)
