"""Over random answers: a response says the same whole and streamed, in the foreground and the background, from any event on."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.edge.jobs.draft import Delta
from services.edge.store.database import database_url
from tests.edge.fakes import Script
from tests.edge.migrated import migrated
from tests.edge.responses.rig import ResponsesApi
from tests.edge.responses.test_stream import Event, assemble, read_events
from tests.edge.test_api_stream_rules import scripts

TOOLS = [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]


@dataclass(frozen=True)
class Case:
    """`looks`: what each look at the job gets. `after`: the event behind which a stream goes on."""

    looks: list[list[Delta]]
    fields: dict[str, Any]
    after: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        choice = draw(st.sampled_from(["auto", "required", {"type": "function", "name": "f"}]))
        fields |= {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": draw(st.booleans())}
    if draw(st.booleans()):
        fields["top_logprobs"] = 1
    return Case(draw(scripts(1)), fields, draw(st.integers(0, 12)))


@settings(max_examples=6)
@given(st.lists(cases(), min_size=6, max_size=6))
def test_a_response_is_the_same_however_it_is_read(some: list[Case]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_all(Path(folder), some))


async def _all(folder: Path, some: list[Case]) -> None:
    async with migrated(database_url("", folder)) as database:
        api = ResponsesApi(database)
        for case in some:
            await _one(api, case)
        await api.background.close()
        assert api.traffic.running == 0


async def _one(api: ResponsesApi, case: Case) -> None:
    api.jobs.default = api.detached.default = Script(deltas=case.looks)
    whole = (await api.respond(**case.fields)).json()
    streamed = assemble(read_events(await api.respond(stream=True, **case.fields)))
    assert (await api.ask("GET", f"/v1/responses/{streamed['id']}")).json() == streamed
    events = read_events(await api.respond(stream=True, background=True, **case.fields))
    behind = assemble(events)
    assert _said(whole) == _said(streamed) == _said(behind)
    if case.fields.get("parallel_tool_calls") is False:
        return  # its job may just be cancelled, and here, unlike in life, that cuts off who still reads
    path, after = f"/v1/responses/{behind['id']}?stream=true", min(case.after, len(events) - 2)
    assert read_events(await api.ask("GET", f"{path}&starting_after={after}")) == events[after + 1 :]


def _said(response: Event) -> Any:
    """Without ids, each of which has to be there once."""
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    for name in ("id", "call_id"):
        ids = [item[name] for item in response["output"] if name in item]
        assert len(set(ids)) == len(ids)
    return items, response["status"], response["incomplete_details"], response["usage"]
