"""Any JSON in any field of a response or a conversation: an answer, or a refusal in the envelope; never a failure of ours."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.edge.responses.conversations import ConversationRequest
from services.edge.responses.request import ResponsesRequest
from services.edge.store.database import database_url
from tests.edge.fakes import MODEL
from tests.edge.migrated import migrated
from tests.edge.responses.rig import ResponsesApi
from tests.edge.test_api_fuzz import FUNCTION, JSON, LEAVES

TEXT = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]) | JSON, "text": LEAVES}
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "content": st.sampled_from(["a", ""]) | st.lists(TEXT, max_size=2) | JSON,
        "id": LEAVES,
        "call_id": LEAVES,
        "name": LEAVES,
        "arguments": st.just("{}") | JSON,
        "output": st.just("a") | st.lists(TEXT, max_size=2) | JSON,
    },
)
TOOL = FUNCTION.map(lambda function: {"type": "function", **function})
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "input": st.lists(ITEM, max_size=3),
    "items": st.lists(ITEM, max_size=3),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}]),
    "text": st.fixed_dictionaries(
        {
            "format": st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "json_schema"]), "name": st.just("x"), "schema": JSON}
            )
        }
    ),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    "include": st.lists(LEAVES, max_size=2),
    "stream": st.booleans(),
    "background": st.booleans(),
    "model": st.just(MODEL),
}


def _bodies(kind: type[Any], least: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(sorted(kind.model_fields))
    pairs = names.flatmap(lambda name: st.tuples(st.just(name), LIKELY.get(name, LEAVES) | JSON))
    return st.lists(pairs, max_size=4).map(lambda fields: {**least, **dict(fields)})


REQUESTS = st.one_of(
    st.tuples(st.just("/v1/responses"), _bodies(ResponsesRequest, {"model": MODEL, "input": "hi"})),
    st.tuples(st.sampled_from(["/v1/conversations", "{conversation}", "{conversation}/items"]), _bodies(ConversationRequest, {})),
)


@settings(max_examples=8)
@given(st.lists(REQUESTS, min_size=15, max_size=15))
def test_any_body_is_answered_or_refused(requests: list[tuple[str, dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_answered_or_refused(Path(folder), requests))


async def _answered_or_refused(folder: Path, requests: list[tuple[str, dict[str, Any]]]) -> None:
    async with migrated(database_url("", folder)) as database:
        api = ResponsesApi(database)
        name = (await api.ask("POST", "/v1/conversations", metadata={})).json()["id"]
        async with api.client() as client:
            for path, body in requests:
                url = path.format(conversation=f"/v1/conversations/{name}")
                answer = await client.post(url, content=json.dumps(body), headers={"content-type": "application/json"})
                assert answer.status_code < 500, (path, body, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        await api.background.close()
        assert api.traffic.running == 0
