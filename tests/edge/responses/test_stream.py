"""The events of a response: what they add up to, and how they are numbered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from schemas.errors import JobFailed
from schemas.reply import FinishReason
from tests.edge.fakes import MODEL, Script, says
from tests.edge.responses.rig import ResponsesApi
from tests.edge.responses.test_create import CALL, WEATHER
from tests.text.tiny import END, byte_ids
from tests.waiting import until

Event = dict[str, Any]


def read_events(answer: httpx.Response) -> list[Event]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.splitlines()
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def assemble(events: list[Event], first: int = 0) -> Event:
    """The object that the deltas add up to, checked against what the events say themselves."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    items: list[Event] = []
    joined: dict[str, str] = {}
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
                joined[event["item"]["id"]] = ""
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                assert event["item_id"] == items[event["output_index"]]["id"]
                joined[event["item_id"]] += event["delta"]
            case "response.output_text.done":
                assert event["text"] == joined[event["item_id"]]
            case "response.function_call_arguments.done":
                assert event["arguments"] == joined[event["item_id"]]
            case "response.output_item.done":
                items[event["output_index"]] = event["item"]
    last: Event = events[-1]["response"]
    assert last["output"] == items
    for item in items:
        assert joined[item["id"]] == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
        assert item["status"] != "in_progress"
    return last


async def test_the_events_of_a_text(api: ResponsesApi) -> None:
    api.jobs.default = says("hel", "lo")
    events = read_events(await api.respond(stream=True))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    last = assemble(events)
    assert (await api.ask("GET", f"/v1/responses/{last['id']}")).json() == last


async def test_a_stream_of_calls_adds_up_to_the_object(api: ResponsesApi) -> None:
    api.jobs.default = says(*f"I look.\n{CALL}\n{CALL}")
    last = assemble(read_events(await api.respond(stream=True, tools=[WEATHER])))
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
    assert (await api.ask("GET", f"/v1/responses/{last['id']}")).json() == last


_TALK = f"I look.\n{CALL}\nthen\n{CALL}\nbye"


async def test_no_character_ends_a_line_for_anybody(api: ResponsesApi) -> None:
    """httpx's `iter_lines` ends one at U+2028 too; JSON holds it as it is."""
    said = "a\u2028b\u2029c\x85d\u00a0é"
    api.jobs.default = says(said)
    assert assemble(read_events(await api.respond(stream=True)))["output"][0]["content"][0]["text"] == said


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("size", [1, 7, 40, len(_TALK)])
async def test_text_and_calls_keep_their_order_however_tokens_were_bundled(
    api: ResponsesApi, size: int, background: bool
) -> None:
    """And the log-probabilities are those of the texts: a call's are not told."""
    api.jobs.default = api.detached.default = says(*(_TALK[at : at + size] for at in range(0, len(_TALK), size)))
    include = ["message.output_text.logprobs"]
    asked = await api.respond(tools=[WEATHER], include=include, background=background, stream=True)
    last = assemble(read_events(asked))
    said = [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in last["output"]]
    assert said == ["I look.", '{"city": "Paris"}', "then", '{"city": "Paris"}', "bye"]
    spelled = ["".join(one["token"] for one in item["content"][0]["logprobs"]) for item in last["output"] if "content" in item]
    assert spelled == ["I look.", "then", "bye"]


async def test_log_probabilities(api: ResponsesApi) -> None:
    events = read_events(await api.respond(stream=True, include=["message.output_text.logprobs"], top_logprobs=2))
    entries = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert len(entries) == 5
    assert len(entries[0]["top_logprobs"]) == 2
    assert assemble(events)["output"][0]["content"][0]["logprobs"] == entries


async def test_the_end_token_has_no_log_probability(api: ResponsesApi) -> None:
    """Also where tokens are read one by one, so that the finish comes after it."""
    api.jobs.default = api.detached.default = Script([[*byte_ids("hi"), END]])
    for background in (False, True):
        events = read_events(await api.respond(stream=True, top_logprobs=1, background=background))
        (item,) = assemble(events)["output"]
        assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["h", "i"]


@pytest.mark.parametrize("text", ["", "x"])
async def test_a_limit(api: ResponsesApi, text: str) -> None:
    api.jobs.default = Script([byte_ids(text)] if text else [], FinishReason.LENGTH)
    events = read_events(await api.respond(stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert assemble(events)["output"][0]["content"][0]["text"] == text


async def test_a_failure_after_the_first_byte(api: ResponsesApi) -> None:
    api.jobs.default = Script([byte_ids("he")], error=JobFailed("The engine failed."))
    events = read_events(await api.respond(stream=True))
    assert events[-1]["type"] == "response.failed"
    last = assemble(events)
    assert (last["status"], last["error"]) == ("failed", {"code": "server_error", "message": "The engine failed."})
    assert (await api.ask("GET", f"/v1/responses/{last['id']}")).json()["status"] == "failed"


async def test_a_refusal_before_the_first_byte_is_a_plain_error(api: ResponsesApi) -> None:
    api.jobs.default = Script(refuse=JobFailed("No."))
    assert (await api.respond(stream=True)).status_code == 500


async def test_a_client_that_leaves_stops_the_compute(api: ResponsesApi) -> None:
    api.jobs.default = Script([byte_ids("x")], pause_s=0.01, forever=True)
    asked = asyncio.create_task(api.respond(stream=True))
    await until(lambda: api.jobs.handles)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: api.jobs.handles[0].cancelled.is_set())


async def test_the_sdk_reads_it(api: ResponsesApi) -> None:
    async with api.sdk() as client, client.responses.stream(model=MODEL, input="hi") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == "hello"
