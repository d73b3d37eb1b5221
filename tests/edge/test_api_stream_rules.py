"""The rules of a stream, over random scripts: tokens, bundling, choices, prompts, stops, tools, failures, clients that leave.

Source of the rules: OpenAI's API reference, "Streaming", and what SDKs were seen to rely on. `tests.edge.sse` checks them event
by event; here the stream is held against the whole answer, the metrics and the jobs.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import JobFailed
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.jobs.draft import Delta
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api, Script
from tests.edge.sse import Read, read_part, read_stream
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "🙂"}}\n</tool_call>'
FRAGMENTS = ["a", "END", "EN", "🙂", "\n", "<", CALL, CALL[:25], CALL.replace('"f"', '"x"'), "{}", '"', "\u2028"]
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


@dataclass(frozen=True)
class Case:
    """`looks`: by prompt, what each look at its job gets."""

    path: str
    looks: list[list[list[Delta]]]
    n: int
    fields: dict[str, Any]

    def api(self, error: bool = False) -> Api:
        api = Api()
        api.jobs.capabilities = Capabilities(seed=True, n=True, logprobs=True, grammar=KINDS)
        api.jobs.context = 8192
        failed = JobFailed("The model failed.") if error else None
        looks = [one[:-1] for one in self.looks] if error else self.looks
        api.jobs.scripts = [Script([], None, failed, deltas=one) for one in looks]
        return api

    def body(self, **fields: Any) -> dict[str, Any]:
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if self.path == CHAT else {"prompt": ["p"] * len(self.looks)}
        return {"model": MODEL, "n": self.n, **prompt, **self.fields, **fields}


@st.composite
def scripts(draw: st.DrawFn, n: int) -> list[list[Delta]]:
    """One job's: each choice's bytes in any bundles, its finish with the last or after it, choices interleaved in any way."""
    left = []
    for choice in range(n):
        ids = byte_ids("".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=4))))
        ids = ids[: len(ids) - draw(st.integers(0, 2))]  # within a character, perhaps
        cuts = sorted({0, len(ids), *(min(cut, len(ids)) for cut in draw(st.lists(st.integers(0, 60), max_size=5)))})
        deltas = [Delta(choice, ids[start:end]) for start, end in pairwise(cuts)]
        end = draw(ENDS)
        if deltas and draw(st.booleans()):
            deltas[-1] = Delta(choice, deltas[-1].tokens, end)
        else:
            deltas.append(Delta(choice, [], end))
        left.append(deltas)
    looks = []
    while any(left):
        waiting = [deltas for deltas in left if deltas]
        some = draw(st.lists(st.sampled_from(range(len(waiting))), min_size=1, max_size=len(waiting), unique=True))
        looks.append([waiting[at].pop(0) for at in some])
    return looks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    path, n = draw(st.sampled_from([CHAT, TEXT])), draw(st.integers(1, 3))
    prompts = 1 if path == CHAT else draw(st.integers(1, 3))
    fields: dict[str, Any] = {"max_tokens": 200}
    if draw(st.booleans()):
        fields["stop"] = draw(st.lists(st.sampled_from(["END", "aa", "🙂", "</tool_call>", "N"]), min_size=1, max_size=2))
    if path == CHAT and draw(st.booleans()):
        fields |= {"tools": TOOLS, "parallel_tool_calls": draw(st.booleans())}
        fields["tool_choice"] = draw(st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}]))
    if draw(st.booleans()):
        fields |= {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    if path == TEXT and draw(st.booleans()):
        fields["echo"] = True
        fields.pop("logprobs", None)
    return Case(path, [draw(scripts(n)) for _ in range(prompts)], n, fields)


EASY = settings(max_examples=60, suppress_health_check=[HealthCheck.data_too_large])


@EASY
@given(case=cases(), usage=st.booleans())
def test_a_stream_keeps_its_rules_and_says_what_the_whole_answer_says(case: Case, usage: bool) -> None:
    asyncio.run(_streamed_and_whole(case, usage))


async def _streamed_and_whole(case: Case, usage: bool) -> None:
    first, second = case.api(), case.api()
    options = {"stream_options": {"include_usage": usage}} if usage else {}
    async with first.client() as client:
        whole = await client.post(case.path, json=case.body())
    async with second.client() as client:
        streamed = await client.post(case.path, json=case.body(stream=True, **options))
    assert (whole.status_code, streamed.status_code) == (200, 200), (whole.text, streamed.text)
    read, said = read_stream(streamed.content, usage=usage), whole.json()
    assert read.usage in (None, said["usage"])
    assert sorted(read.choices) == [choice["index"] for choice in said["choices"]] == list(range(case.n * len(case.looks)))
    for choice in said["choices"]:
        _same(choice, read)
    for api in (first, second):
        assert api.traffic.running == 0
        assert _counted(api) == said["usage"]["completion_tokens"]
        assert all(handle.done or handle.cancelled.is_set() for handle in api.jobs.handles)
        assert not any(handle.done and handle.cancelled.is_set() for handle in api.jobs.handles)


def _same(choice: dict[str, Any], read: Read) -> None:
    streamed = read.choices[choice["index"]]
    assert choice["finish_reason"] == streamed.finish
    message = choice.get("message")
    if message is None:
        assert choice["text"] == streamed.content
        return
    assert (message["content"] or "") == streamed.content
    assert _without_ids(message.get("tool_calls", [])) == _without_ids(streamed.calls)
    assert (choice["logprobs"] or {"content": []})["content"] == streamed.logprobs
    if streamed.finish == "tool_calls":
        assert streamed.calls


def _without_ids(calls: list[dict[str, Any]]) -> list[Any]:
    assert len({call["id"] for call in calls}) == len(calls)
    return [call["function"] for call in calls]


def _counted(api: Api) -> int:
    """Generated tokens in the metrics."""
    lines = [line for line in api.metrics.prometheus_text().decode().splitlines() if "generation_tokens_total{" in line]
    return int(float(lines[0].rpartition(" ")[2])) if lines else 0


@EASY
@given(case=cases())
def test_a_failure_is_one_event_and_the_last(case: Case) -> None:
    asyncio.run(_failing(case))


async def _failing(case: Case) -> None:
    streaming, waiting = case.api(error=True), case.api(error=True)
    async with streaming.client() as client:
        streamed = await client.post(case.path, json=case.body(stream=True))
    async with waiting.client() as client:
        whole = await client.post(case.path, json=case.body())
    if all(handle.done or handle.cancelled.is_set() for handle in streaming.jobs.handles) and b'"error"' not in streamed.content:
        return  # stop strings ended all choices before the failure
    read = read_stream(streamed.content)
    assert read.error is not None
    assert whole.status_code == 500
    assert whole.json()["error"] == read.error
    for api in (streaming, waiting):
        assert all(handle.done or handle.cancelled.is_set() for handle in api.jobs.handles)


@EASY
@given(case=cases(), sends=st.integers(0, 12), stream=st.booleans())
def test_a_client_that_leaves_has_seen_whole_events_and_stops_the_compute(case: Case, sends: int, stream: bool) -> None:
    asyncio.run(_leaving(case, sends, stream))


async def _leaving(case: Case, sends: int, stream: bool) -> None:
    api, gone = case.api(), asyncio.Event()
    sent: list[bytes] = []
    body = [{"type": "http.request", "body": json.dumps(case.body(stream=stream)).encode(), "more_body": False}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) > sends and not gone.is_set():
            gone.set()
            await asyncio.Event().wait()  # the connection is dead

    scope = {
        "type": "http",
        "method": "POST",
        "path": case.path,
        "raw_path": case.path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("edge", 80),
        "http_version": "1.1",
    }
    async with asyncio.timeout(PATIENCE_S):
        await api.app(scope, receive, send)
    seen = len(sent)
    await asyncio.sleep(0)
    assert len(sent) == seen <= sends + 1
    assert api.traffic.running == 0
    assert all(handle.done or handle.cancelled.is_set() for handle in api.jobs.handles)
    data = b"".join(sent)
    if stream and data:
        assert data.endswith(b"\n\n")
        read_part([block for block in data.decode().split("\n\n") if block not in ("", "data: [DONE]")])
