"""Create, retrieve, delete, input items, and what came before."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from schemas.errors import JobFailed
from schemas.job import unpack_ids
from schemas.reply import FinishReason
from services.edge.store.database import Database
from tests.edge.fakes import MODEL, Script, says
from tests.edge.responses.rig import ResponsesApi
from tests.edge.test_template_variables import OFF, THINKING
from tests.text.tiny import tiny_tokenizer

WEATHER = {"type": "function", "name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}}
NEVER = "resp_" + "0" * 32
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def prompt(api: ResponsesApi) -> str:
    return tiny_tokenizer().spell_all(unpack_ids(api.jobs.draft.prompt))


async def test_a_response(api: ResponsesApi) -> None:
    async with api.sdk() as client:
        made = await client.responses.create(
            model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9, temperature=0.5
        )
        assert made.status == "completed"
        assert made.output_text == "hello"
        assert (made.object, made.model, made.instructions, made.metadata) == ("response", MODEL, "Be brief.", {"a": "b"})
        assert (made.temperature, made.max_output_tokens, made.store) == (0.5, 9, True)  # type: ignore[attr-defined]
        assert made.usage is not None
        assert made.usage.output_tokens == 5
        assert made.usage.total_tokens == made.usage.input_tokens + 5
        assert await client.responses.retrieve(made.id) == made
        (item,) = (await client.responses.input_items.list(made.id)).data
        assert item.content[0].text == "hi"  # type: ignore[union-attr]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert prompt(api) == "<|system|>Be brief.<|end|>\n<|user|>hi<|end|>\n<|assistant|>"


async def test_the_history_goes_along_previous_responses(api: ResponsesApi) -> None:
    first = (await api.respond(input="one", instructions="Not carried over.")).json()
    second = (await api.respond(input="two", previous_response_id=first["id"])).json()
    third = await api.respond(input="three", previous_response_id=second["id"])
    assert third.json()["previous_response_id"] == second["id"]
    said = "<|end|>\n<|assistant|>hello<|end|>\n<|user|>"
    assert prompt(api) == f"<|user|>one{said}two{said}three<|end|>\n<|assistant|>"


async def test_a_history_with_a_gap_is_refused(api: ResponsesApi) -> None:
    first = (await api.respond(input="one")).json()["id"]
    second = (await api.respond(input="two", previous_response_id=first)).json()["id"]
    await api.ask("DELETE", f"/v1/responses/{first}")
    for previous in (second, first, "resp_none"):
        refused = await api.respond(previous_response_id=previous)
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_what_is_not_stored_cannot_be_found(api: ResponsesApi) -> None:
    made = (await api.respond(store=False)).json()
    assert (await api.ask("GET", f"/v1/responses/{made['id']}")).status_code == 404


async def test_tenants_do_not_see_each_other(api: ResponsesApi) -> None:
    """faults.md, privacy: another tenant's id, previous_response_id across keys: as an id that never was, word for word."""
    ours, theirs = api.keys.make(tenant="acme"), api.keys.make(tenant="globex")
    name = (await api.respond(ours)).json()["id"]
    for method, path in (
        ("GET", ""),
        ("GET", "/input_items"),
        ("GET", "?stream=true"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ):
        answer = await api.ask(method, f"/v1/responses/{name}{path}", theirs)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        nobodys = await api.ask(method, f"/v1/responses/{NEVER}{path}", theirs)
        assert answer.text.replace(name, NEVER) == nobodys.text
    across, unknown = [await api.respond(theirs, previous_response_id=one) for one in (name, NEVER)]
    assert (across.status_code, across.text.replace(name, NEVER)) == (404, unknown.text)
    assert (await api.ask("GET", f"/v1/responses/{name}", ours)).status_code == 200


async def test_a_limit_makes_it_incomplete(api: ResponsesApi) -> None:
    api.jobs.default = says("hel", finish=FinishReason.LENGTH)
    made = (await api.respond()).json()
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["status"] == "incomplete"


async def test_a_call_and_its_output(api: ResponsesApi) -> None:
    api.jobs.scripts = [says(f"I look.\n{CALL}"), says("Rain.")]
    async with api.sdk() as client:
        asked: Any = {"model": MODEL, "tools": [WEATHER]}
        first = await client.responses.create(input="Weather?", **asked)
        said, call = first.output
        assert said.type == "message"
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Paris"}', "completed")
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        second = await client.responses.create(input=output, previous_response_id=first.id, **asked)
        assert second.output_text == "Rain."
    assert "<tool_response>\nrain\n</tool_response>" in prompt(api)
    assert "I look." in prompt(api)


async def test_a_sent_history_reads_like_a_stored_one(api: ResponsesApi) -> None:
    """What a client keeps itself and sends again gives the prompt that `previous_response_id` gives."""
    api.jobs.scripts = [says(CALL), says("x"), says("x")]
    made = (await api.respond(tools=[WEATHER])).json()
    new = {
        "type": "function_call_output",
        "call_id": made["output"][0]["call_id"],
        "output": [{"type": "input_text", "text": "r"}],
    }
    await api.respond(input=[new], tools=[WEATHER], previous_response_id=made["id"])
    stored = prompt(api)
    await api.respond(input=[{"role": "user", "content": "hi"}, *made["output"], new], tools=[WEATHER])
    assert prompt(api) == stored


async def test_variables_of_the_chat_template(database: Database) -> None:
    api = ResponsesApi(database, template=THINKING)
    for background in (False, True):
        made = await api.respond(chat_template_kwargs={"enable_thinking": False}, background=background)
        assert made.status_code == 200
    drafts = [api.jobs.draft, *(job.draft for job in api.detached.jobs.values())]
    assert [tiny_tokenizer().decode(unpack_ids(draft.prompt)) for draft in drafts] == [OFF, OFF]
    refused = await api.respond(chat_template_kwargs={"tools": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs.tools")
    await api.background.close()


async def test_formats_hold_the_engine(api: ResponsesApi) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    for form, kind in ((schema, "json_schema"), ({"type": "json_object"}, "json_object"), ({"type": "text"}, None)):
        made = await api.respond(text={"format": form})
        assert made.status_code == 200, made.text
        grammar = api.jobs.draft.sampling.grammar
        assert (grammar.kind if grammar else None) == kind
        assert made.json()["text"]["format"] == form


async def test_tool_choice_holds_the_engine(api: ResponsesApi) -> None:
    api.jobs.default = says(CALL)
    for choice in ("required", {"type": "function", "name": "weather"}):
        made = await api.respond(tools=[WEATHER], tool_choice=choice)
        assert made.status_code == 200, made.text
        assert api.jobs.draft.sampling.grammar is not None
        assert made.json()["output"][0]["type"] == "function_call"


async def test_input_items_in_pages(api: ResponsesApi) -> None:
    items = [{"role": "user", "content": f"m{number}"} for number in range(5)]
    name = (await api.respond(input=items)).json()["id"]
    path, seen = f"/v1/responses/{name}/input_items?order=asc&limit=2", list[str]()
    after = ""
    for _ in range(3):
        page = (await api.ask("GET", path + after)).json()
        seen += [item["content"][0]["text"] for item in page["data"]]
        after = f"&after={page['last_id']}"
    assert seen == ["m0", "m1", "m2", "m3", "m4"]
    assert page["has_more"] is False
    newest = (await api.ask("GET", f"/v1/responses/{name}/input_items")).json()["data"]
    assert newest[0]["content"][0]["text"] == "m4"


async def test_a_failure_is_an_error_and_leaves_nothing(api: ResponsesApi) -> None:
    api.jobs.default = Script([[5]], error=JobFailed("The engine failed."))
    failed = await api.respond()
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "job_failed")


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "x", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [IMAGE]}, "input[0].content[0].type"),
    ({"input": [{"type": "reasoning"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": {"a": 1}}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
    ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"text": {"format": {"type": "x"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": "x"}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"truncation": "auto"}, "truncation"),
    ({"truncation": "x"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"reasoning": {"effort": "none", "summary": "auto"}}, "reasoning"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"stop": "x"}, "stop"),
    ({"n": 2}, "n"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": 5}, "conversation"),
    ({"conversation": "conv_none"}, "conversation"),
    ({"conversation": "conv_none", "previous_response_id": "x"}, "previous_response_id"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_refusals_name_the_place(api: ResponsesApi, fields: dict[str, Any], param: str) -> None:
    refused = await api.respond(**fields)
    assert refused.status_code in (400, 404), refused.text
    assert refused.json()["error"]["param"] == param
    assert not api.jobs.handles


async def test_null_is_absent(api: ResponsesApi) -> None:
    names = (
        "instructions",
        "metadata",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "truncation",
        "previous_response_id",
        "store",
    )
    assert (await api.respond(**dict.fromkeys(names))).status_code == 200


async def test_reasoning_that_is_none_is_what_every_model_does(api: ResponsesApi) -> None:
    assert (await api.respond(reasoning={"effort": "none", "summary": None})).status_code == 200
