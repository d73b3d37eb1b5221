"""Background responses: created, looked at, streamed again from any event, cancelled, ended without a reader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import JobFailed, Overloaded, StoreUnavailable, UnreadableMessage
from services.edge.gate.limits import Limits
from services.edge.store.database import Database
from services.edge.store.records import JobState
from services.edge.store.responses import SqlResponseStore
from services.settings.edge import EdgeSettings
from tests.edge.fakes import MODEL, Script, says
from tests.edge.responses.rig import ResponsesApi
from tests.edge.responses.test_create import CALL, WEATHER
from tests.edge.responses.test_stream import assemble, read_events
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until


async def stands(api: ResponsesApi, name: str, *wanted: str) -> dict[str, Any]:
    """The object, once its status is one of `wanted`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found: dict[str, Any] = (await api.ask("GET", f"/v1/responses/{name}")).json()
            if found["status"] in wanted:
                return found
            await asyncio.sleep(0.01)


def waits() -> Script:
    """A script that says nothing before its `go` is set."""
    return Script([byte_ids("hello")], go=asyncio.Event())


async def test_it_is_queued_runs_and_is_complete(api: ResponsesApi) -> None:
    script = waits()
    api.detached.scripts = [script]
    made = (await api.respond(background=True)).json()
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    await stands(api, made["id"], "in_progress")
    assert script.go is not None
    script.go.set()
    done = await stands(api, made["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "hello"
    assert done["usage"]["output_tokens"] == 5


async def test_a_stream_goes_on_from_any_event(api: ResponsesApi) -> None:
    """However the tokens were bundled for the first reader and for the next."""
    api.detached.default = says("I lo", f"ok.\n{CALL}", f"\n{CALL}")
    events = read_events(await api.respond(background=True, stream=True, tools=[WEATHER]))
    assert [(event["type"], event["response"]["status"]) for event in events[:3]] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    last = assemble(events)
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
    assert (await api.ask("GET", f"/v1/responses/{last['id']}")).json() == last
    for job in api.detached.jobs.values():
        job.script = says(*f"I look.\n{CALL}\n{CALL}")
    for after in (-1, 0, 1, 5, len(events) // 2, len(events) - 2):
        query = f"&starting_after={after}" if after >= 0 else ""
        again = read_events(await api.ask("GET", f"/v1/responses/{last['id']}?stream=true{query}"))
        assert again == events[after + 1 :]


@pytest.mark.parametrize("script", [says("hello"), Script([byte_ids("he")], error=JobFailed("The engine failed."))])
async def test_events_after_one_that_never_was(api: ResponsesApi, script: Script) -> None:
    """Of an ended response they are refused: a stream without an event would be an answer of nothing to its client."""
    api.detached.default = script
    events = read_events(await api.respond(background=True, stream=True))
    name, count = events[0]["response"]["id"], len(events)
    await stands(api, name, "completed", "failed")
    for after in (count, count + 1, 10**6):
        refused = await api.ask("GET", f"/v1/responses/{name}?stream=true&starting_after={after}")
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "starting_after")
        assert f"last event is {count - 1}." in error["message"]
    again = await api.ask("GET", f"/v1/responses/{name}?stream=true&starting_after={count - 2}")
    assert read_events(again) == events[-1:]
    nothing_more = await api.ask("GET", f"/v1/responses/{name}?stream=true&starting_after={count - 1}")
    assert (nothing_more.status_code, nothing_more.content) == (200, b"")


async def test_events_that_a_running_response_may_still_have_are_waited_for(api: ResponsesApi) -> None:
    """And when it ends before them, the stream says so."""
    script = waits()
    api.detached.default = script
    name = (await api.respond(background=True)).json()["id"]
    (job,) = api.detached.jobs.values()
    waiting = [asyncio.create_task(_events_after(api, name, after)) for after in (4, 10_000)]
    await until(lambda: len(job.readers) == 3)
    assert script.go is not None
    script.go.set()
    events, missed = [await one for one in waiting]
    assert (events[0]["sequence_number"], events[-1]["type"]) == (5, "response.completed")
    (error,) = missed
    assert error == {
        "type": "error",
        "code": "invalid_value",
        "message": f"'starting_after' is 10000, and the response's last event is {events[-1]['sequence_number']}.",
        "param": "starting_after",
        "sequence_number": events[-1]["sequence_number"] + 1,
    }


async def _events_after(api: ResponsesApi, name: str, after: int) -> list[dict[str, Any]]:
    async with api.sdk() as client:
        return [event.to_dict() async for event in await client.responses.retrieve(name, stream=True, starting_after=after)]


async def test_the_sdk_resumes(api: ResponsesApi) -> None:
    async with api.sdk() as client:
        first = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        name, text, at = "", "", 0
        async for event in first:
            at = event.sequence_number
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
                break
        async for event in await client.responses.retrieve(name, stream=True, starting_after=at):
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == "hello" == (await client.responses.retrieve(name)).output_text


async def test_the_helper_of_the_sdk_resumes(api: ResponsesApi) -> None:
    """It builds the response of the events; text and calls in their order."""
    api.detached.default = says(*f"I look.\n{CALL}\nbye")
    async with api.sdk() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True, tools=[WEATHER])  # type: ignore[list-item]
        async with client.responses.stream(response_id=made.id, starting_after=6) as stream:
            numbers = [event.sequence_number async for event in stream]
            final = await stream.get_final_response()
    assert numbers == list(range(7, 7 + len(numbers)))
    assert [item.type for item in final.output] == ["message", "function_call", "message"]
    assert final.output_text == "I look.bye"


async def test_cancelled(api: ResponsesApi) -> None:
    api.detached.default = waits()
    made = (await api.respond(background=True)).json()
    streamed = asyncio.create_task(api.ask("GET", f"/v1/responses/{made['id']}?stream=true"))
    (job,) = api.detached.jobs.values()
    await until(lambda: len(job.readers) == 2)
    cancelled = (await api.ask("POST", f"/v1/responses/{made['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert api.detached.cancelled
    again = (await api.ask("POST", f"/v1/responses/{made['id']}/cancel")).json()
    assert again == cancelled == await stands(api, made["id"], "cancelled")
    last = read_events(await streamed)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_only_a_background_response_can_be_cancelled_or_streamed_again(api: ResponsesApi) -> None:
    name = (await api.respond()).json()["id"]
    assert (await api.ask("POST", f"/v1/responses/{name}/cancel")).status_code == 400
    assert (await api.ask("GET", f"/v1/responses/{name}?stream=true")).status_code == 400


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", "false", "False", "0", "", "yes", "maybe"])
async def test_whether_it_is_streamed_is_said_or_refused(api: ResponsesApi, text: str) -> None:
    """Whoever waits for events would take the object for a stream without any."""
    name = (await api.respond(background=True)).json()["id"]
    answer = await api.ask("GET", f"/v1/responses/{name}?stream={text}")
    if text.lower() in ("true", "1"):
        assert read_events(answer)
    elif text.lower() in ("false", "0"):
        assert answer.json()["id"] == name
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_deleted_while_it_runs(api: ResponsesApi) -> None:
    api.detached.default = waits()
    name = (await api.respond(background=True)).json()["id"]
    assert (await api.ask("DELETE", f"/v1/responses/{name}")).json()["deleted"]
    assert not api.detached.jobs
    assert (await api.ask("GET", f"/v1/responses/{name}")).status_code == 404


async def test_it_fails(api: ResponsesApi) -> None:
    api.detached.default = Script([byte_ids("he")], error=JobFailed("The engine failed."))
    made = (await api.respond(background=True)).json()
    failed = await stands(api, made["id"], "failed")
    assert failed["error"]["message"] == "The engine failed."
    assert failed["output"][0]["content"][0]["text"] == "he"


async def test_a_refused_one_leaves_nothing(api: ResponsesApi) -> None:
    api.detached.default = Script(refuse=Overloaded("Too many.", retry_after=1.0))
    refused = await api.respond(background=True)
    assert refused.status_code == 503
    assert not api.detached.jobs


async def test_one_whose_row_cannot_be_written_is_called_off(api: ResponsesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client hears why, and nothing of its limits is taken."""

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)

    key = api.keys.make(tenant="acme", limits=Limits(requests_per_minute=1, tokens_per_minute=1000))
    monkeypatch.setattr(api.background._store, "add", away)
    refused = await api.respond(key, background=True, max_output_tokens=100)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "The database cannot be used now.")
    assert (api.detached.undone, api.detached.jobs) == ([f"d{1:031x}"], {})
    monkeypatch.undo()
    assert (await api.respond(key, background=True, max_output_tokens=100)).status_code == 200


async def test_its_job_is_told_who_pays(api: ResponsesApi) -> None:
    key = api.keys.make(tenant="acme", limits=Limits(tokens_per_day=10_000, tokens_per_minute=10_000, concurrent=5))
    settings = EdgeSettings(price_per_compute_s=2.0, model_prices={MODEL: 0.5})
    api.background._served = replace(api.served, settings=settings)
    booking = asyncio.create_task(api.budgets.run())
    made = await api.respond(key, background=True, max_output_tokens=100)
    assert made.status_code == 200, made.text
    booking.cancel()
    ((name, job),) = api.detached.jobs.items()
    record = next(iter(api.keys.records.values()))
    assert (job.tenant, job.bill.key, job.bill.model, job.bill.price) == ("acme", record.id, MODEL, 0.5)
    assert job.bill.prompt_tokens == job.draft.prompt_tokens
    assert [owner for owner, _ in job.bill.budgets] == [f"key-{record.id}"]
    api.detached.end(name, 20)
    assert await api.budgets.flush()
    assert not api.usage.entries, "it is booked with its row"


@pytest.mark.parametrize("by", ["look", "retrieve"])
async def test_another_edge_ends_what_one_left(api: ResponsesApi, database: Database, by: str) -> None:
    api.detached.default = waits()
    name = (await api.respond(background=True)).json()["id"]
    await api.background.close()
    other = ResponsesApi(database)
    other.detached.jobs = api.detached.jobs
    (job,) = other.detached.jobs.values()
    job.script, job.state = says("hello"), JobState.FINISHED
    if by == "look":
        await other.background.look()
        job.script = says("not read again")
    done = await stands(other, name, "completed")
    assert done["output"][0]["content"][0]["text"] == "hello"


async def test_a_job_whose_tokens_are_gone_has_failed(api: ResponsesApi) -> None:
    api.detached.default = waits()
    name = (await api.respond(background=True)).json()["id"]
    await api.background.close()
    api.detached.jobs.clear()
    assert (await stands(api, name, "failed"))["output"] == []


async def test_one_that_cannot_be_read_holds_up_no_other(api: ResponsesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests that this version cannot read, nor one whose row does not come; what ended well is left to who can."""
    api.detached.default = waits()
    buried, newer, away, good = [(await api.respond(background=True)).json()["id"] for _ in range(4)]
    await api.background.close()
    for job in api.detached.jobs.values():
        job.script, job.state = says("hello"), JobState.FINISHED
    api.detached.jobs[buried.removeprefix("resp_")].state = JobState.FAILED
    unreadable = UnreadableMessage("No such version.")
    attach, wrong = api.detached.attach, {buried: unreadable, newer: unreadable, away: StoreUnavailable("Away.")}

    async def some(job: str, tenant: str) -> Any:
        if (error := wrong.get(f"resp_{job}")) is not None:
            raise error
        return await attach(job, tenant)

    monkeypatch.setattr(api.detached, "attach", some)
    await api.background.look()
    assert (await stands(api, good, "completed"))["output"][0]["content"][0]["text"] == "hello"
    assert (await stands(api, buried, "failed"))["error"] == {"code": "server_error", "message": "Internal error."}
    wrong.clear()
    for name in (newer, away):
        await stands(api, name, "completed")


@pytest.mark.parametrize("background", [True, False])
async def test_what_it_did_not_use_of_a_limit_comes_back(api: ResponsesApi, background: bool) -> None:
    key = api.keys.make(tenant="acme", limits=Limits(tokens_per_minute=1000))
    for _ in range(3):
        made = await api.respond(key, max_output_tokens=800, background=background)
        assert made.status_code == 200, made.text
        if background:
            api.detached.end(made.json()["id"].removeprefix("resp_"), 10)
        async with asyncio.timeout(PATIENCE_S):
            while (await _remaining(api, key)) < 700:  # noqa: ASYNC110 - told in headers only
                await asyncio.sleep(0.01)


async def _remaining(api: ResponsesApi, key: str) -> int:
    return int((await api.ask("GET", "/v1/models", key)).headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("steps", [(CALL, f"\n{CALL}"), (f"{CALL}\nMore:\n{CALL}", "")], ids=["call by call", "at once"])
async def test_after_the_only_call_that_is_allowed_it_is_stopped(api: ResponsesApi, steps: tuple[str, ...]) -> None:
    """What the engine said beyond it is neither told nor counted."""
    api.detached.default = says(*steps)
    made = (await api.respond(background=True, tools=[WEATHER], parallel_tool_calls=False)).json()
    end = await stands(api, made["id"], "completed")
    assert [item["type"] for item in end["output"]] == ["function_call"]
    assert end["usage"]["output_tokens"] == CALL.index("}}") + 2
    await until(lambda: api.detached.cancelled)


async def test_a_later_response_builds_on_it_once_it_has_ended(api: ResponsesApi) -> None:
    script = waits()
    api.detached.scripts = [script]
    name = (await api.respond(background=True)).json()["id"]
    assert (await api.respond(previous_response_id=name)).json()["error"]["param"] == "previous_response_id"
    assert script.go is not None
    script.go.set()
    await stands(api, name, "completed")
    assert (await api.respond(previous_response_id=name)).status_code == 200


async def test_a_database_that_is_away_fails_a_stream_and_not_the_response(api: ResponsesApi, database: Database) -> None:
    class Away(SqlResponseStore):
        async def end(self, tenant: str, ended: Any) -> Any:
            api.background._store = there
            raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)

    there = api.background._store
    script = waits()
    api.detached.default = script
    name = (await api.respond(background=True)).json()["id"]
    await api.background.close()
    streamed = asyncio.create_task(api.ask("GET", f"/v1/responses/{name}?stream=true"))
    (job,) = api.detached.jobs.values()
    await until(lambda: job.readers)
    api.background._store = Away(database)
    assert script.go is not None
    script.go.set()
    assert read_events(await streamed)[-1]["type"] == "response.failed"
    job.state = JobState.FINISHED
    assert (await stands(api, name, "completed", "failed"))["status"] == "completed"
