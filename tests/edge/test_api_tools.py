"""Tools: what the model is asked, what the engine is held to, and the calls that clients see, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from schemas.errors import DeadlineExceeded
from schemas.job import unpack_ids
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.text.grammar import KINDS
from tests.edge.fakes import Api, says
from tests.edge.sse import events, read_stream
from tests.text.tiny import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NO_SCHEMA = {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def api() -> Api:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, grammar=KINDS, n=True, logprobs=True)
    api.jobs.context = 4096
    return api


async def both(api: Api, text: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> dict[str, Any]:
    """The only choice of the whole answer; the streamed one says the same."""
    api.jobs.default = says(*text, finish=finish)
    (whole,) = (await api.post(**fields)).json()["choices"]
    streamed = _streamed((await api.post(stream=True, **fields)).content)
    assert streamed["finish_reason"] == whole["finish_reason"]
    message = whole["message"]
    assert streamed["content"] == (message["content"] or "")
    told = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", [])]
    assert [{k: v for k, v in call.items() if k != "id"} for call in streamed["calls"]] == told
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("call_") for name in ids)
    return dict(whole)


def _streamed(data: bytes) -> dict[str, Any]:
    """Joins the deltas as a client does: by index, the first delta of a call has its id and name."""
    blocks = [block for block in events(data) if not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    content, finish, calls = "", None, list[dict[str, Any]]()
    for block in blocks[:-1]:
        (choice,) = json.loads(block.removeprefix("data: "))["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
            else:
                assert delta["index"] == len(calls) - 1
                assert delta.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return {"content": content, "finish_reason": finish, "calls": calls}


async def test_a_call(api: Api) -> None:
    """Case 15: the finish is `tool_calls` both ways."""
    choice = await both(api, CALL, tools=[WEATHER])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


async def test_text_and_several_calls(api: Api) -> None:
    choice = await both(api, f"I look.\n{CALL}\n{CALL}", tools=[WEATHER, CLOCK])
    assert choice["message"]["content"] == "I look."
    assert len(choice["message"]["tool_calls"]) == 2


async def test_no_call_is_an_ordinary_answer(api: Api) -> None:
    choice = await both(api, "It rains. <tool", tools=[WEATHER])
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "It rains. <tool", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_a_stop_string_while_a_tag_is_held_back(api: Api) -> None:
    """Case 6: what was held is content, before the finish."""
    choice = await both(api, "<tool|END|never", tools=[WEATHER], stop="END")
    assert choice["message"]["content"] == "<tool|"
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_finishes_with_length(api: Api) -> None:
    choice = await both(api, CALL[:60], FinishReason.LENGTH, tools=[WEATHER])
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris'


async def test_one_call_only(api: Api) -> None:
    choice = await both(api, f"{CALL}\n{CALL}", tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert all(handle.cancelled.is_set() for handle in api.jobs.handles)


async def test_an_engine_that_never_says_that_it_has_finished(api: Api) -> None:
    """Case 14: the finish comes with the last call that was allowed; where more may follow, an error does, when time is up."""
    for fields, finish in (({"parallel_tool_calls": False}, "tool_calls"), ({"tool_choice": NAMED}, "stop")):
        api.jobs.default = says(*CALL, finish=None)
        streamed = await api.post(stream=True, stream_options={"include_usage": True}, tools=[WEATHER], **fields)
        read = read_stream(streamed.content, usage=True)
        assert (read.finish, len(read.choices[0].calls)) == (finish, 1)
    late = says(*CALL, finish=None)
    late.error = DeadlineExceeded("The request did not finish in time.")
    api.jobs.default = late
    read = read_stream((await api.post(stream=True, tools=[WEATHER], tool_choice="auto")).content)
    assert read.error is not None
    assert [call["function"]["name"] for call in read.choices[0].calls] == ["weather"]
    assert (await api.post(tools=[WEATHER])).status_code == 504


async def test_a_function_named_by_the_caller_finishes_with_stop(api: Api) -> None:
    """As OpenAI's API does."""
    choice = await both(api, CALL, tools=[WEATHER, CLOCK], tool_choice=NAMED)
    assert choice["finish_reason"] == "stop"
    assert len(choice["message"]["tool_calls"]) == 1


async def test_tool_choice_none_looks_for_no_calls(api: Api) -> None:
    choice = await both(api, CALL, tools=[WEATHER], tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert "Tools" not in _prompt(api)


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": None}, {"parallel_tool_calls": None}])
async def test_null_and_empty_are_absent(api: Api, fields: dict[str, Any]) -> None:
    """Case 27."""
    assert (await api.post(**fields)).status_code == 200


async def test_a_template_that_knows_no_tools_is_told_in_words(api: Api) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_asked("1", '{"city": "Paris"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert (await api.post(messages=messages, tools=[WEATHER])).status_code == 200
    prompt = _prompt(api)
    assert '"name": "weather"' in prompt
    assert CALL in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


@pytest.mark.parametrize(("arguments", "shown"), [("{}", "{}"), ("", "{}"), (" ", "{}"), ("a", '"a"'), ("[1]", "[1]")])
async def test_what_a_template_is_told_of_arguments(api: Api, arguments: str, shown: str) -> None:
    """An object if they are one, and nothing is one, as for the parsers; else what the caller wrote."""
    asked = {"role": "assistant", "tool_calls": [_asked("1", arguments)]}
    assert (await api.post(messages=[asked, {"role": "tool", "tool_call_id": "1", "content": "x"}])).status_code == 200
    assert f'"arguments": {shown}}}' in _prompt(api)


async def test_what_the_engine_is_held_to(api: Api) -> None:
    await api.post(tools=[WEATHER])
    assert api.jobs.draft.sampling.grammar is None
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": [_strict(WEATHER)]}):
        await api.post(**{"tools": [WEATHER, CLOCK], **fields})
        grammar = api.jobs.draft.sampling.grammar
        assert grammar is not None
        assert grammar.kind == "grammar"
        assert r"\"weather\"" in grammar.source
        assert ("clock" in grammar.source) == (fields == {"tool_choice": "required"})


async def test_functions_with_definitions(api: Api) -> None:
    """As the official SDK writes a model within a model: `$ref` is to the function's own schema."""
    tool = json.loads(json.dumps(pydantic_function_tool(Trip)))
    assert "$defs" in tool["function"]["parameters"]
    for fields in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        answer = await api.post(tools=[tool, WEATHER], **fields)
        assert answer.status_code == 200, answer.text


class Place(BaseModel):
    city: str


class Trip(BaseModel):
    """Where from, where to."""

    start: Place
    stops: list[Place]
    end: Place | None


async def test_a_schema_that_cannot_be_kept_to_is_refused_by_name(api: Api) -> None:
    def tool(**parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}

    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for odd, word in ((unique, "uniqueItems"), ({"type": "string"}, "object"), ({"type": "object", "not": {}}, "not")):
        refused = await api.post(tools=[tool(**odd)])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert word in refused.json()["error"]["message"]


async def test_escapes_that_are_no_text_end_no_answer(api: Api) -> None:
    """Half a surrogate pair has no UTF-8, so it stays as the model spelled it."""
    escaped = '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>'
    choice = await both(api, escaped, tools=[WEATHER])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "\\ud800"}'
    nameless = '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>'
    assert (await both(api, nameless, tools=[WEATHER]))["message"]["content"] == nameless


async def test_beside_a_response_format(api: Api) -> None:
    await api.post(tools=[WEATHER], response_format={"type": "json_object"})
    grammar = api.jobs.draft.sampling.grammar
    assert grammar is not None
    assert "calls | content" in grammar.source


async def test_an_engine_without_grammars(api: Api) -> None:
    api.jobs.capabilities = Capabilities(seed=True)
    assert (await both(api, CALL, tools=[_strict(WEATHER)]))["finish_reason"] == "tool_calls"
    assert api.jobs.draft.sampling.grammar is None
    refused = await api.post(tools=[WEATHER], tool_choice="required")
    assert refused.json()["error"]["param"] == "tool_choice"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [WEATHER], "response_format": {"type": "regex", "pattern": "a"}}, "response_format"),
    ({"tools": [NO_SCHEMA], "tool_choice": "required"}, "tools"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_refusals_name_the_place(api: Api, fields: dict[str, Any], param: str) -> None:
    response = await api.post(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not api.jobs.handles


@pytest.mark.parametrize("depth", [20, 100, 130, 300, 900, 100_000])
async def test_nesting_without_end(api: Api, depth: int) -> None:
    """In a body it is refused; arguments that hold such a JSON text stay text."""
    api.jobs.context = 10**6
    arguments = '{"a":' * depth + "{" + "}" * (depth + 1)
    messages = [{"role": "assistant", "tool_calls": [_asked("1", arguments)]}, {"role": "user", "content": "x"}]
    assert (await api.post(messages=messages, max_tokens=1)).status_code == 200
    for field in ('"tools":[{"type":"function","function":{"name":"a","parameters":%s}}]', '"extra":%s'):
        chat = '{"model":"tiny","messages":[{"role":"user","content":"hi"}],' + field % arguments + "}"
        response = await api.post(chat.encode())
        assert response.status_code == (200 if depth <= 100 else 400), response.text


def _asked(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def _prompt(api: Api) -> str:
    return tiny_tokenizer().decode(unpack_ids(api.jobs.draft.prompt))
