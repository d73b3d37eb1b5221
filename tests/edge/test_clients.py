"""Clients as people have them: LangChain and `curl`, each with its own idea of the API, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from schemas.errors import JobFailed
from schemas.state import Capabilities
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.test_http import served
from tests.text.tiny import byte_ids
from tests.waiting import until

LIMIT_S = 30.0
ARGUMENTS = {"city": "Paris"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Edge:
    """An application, and where it is served."""

    def __init__(self, api: Api, port: int) -> None:
        self.api = api
        self.base = f"http://127.0.0.1:{port}/v1"

    def langchain(self, **fields: Any) -> ChatOpenAI:
        key = SecretStr("unused")
        return ChatOpenAI(model=MODEL, base_url=self.base, api_key=key, max_retries=0, timeout=LIMIT_S, **fields)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, n=True, logprobs=True, grammar=KINDS)
    api.jobs.context = 8192  # a token is a byte here, and agents' prompts are long
    async with served(api) as server:
        yield Edge(api, server.port)


async def test_langchain_whole_and_streamed(edge: Edge) -> None:
    edge.api.jobs.default = says("hel", "lo ", "🙂")
    llm = edge.langchain(max_tokens=50, temperature=0.5)
    whole = await llm.ainvoke([HumanMessage("hi")])
    assert (whole.content, whole.response_metadata["finish_reason"]) == ("hello 🙂", "stop")
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] == 10
    assert edge.api.jobs.draft.sampling.max_tokens == 50  # it is sent as max_completion_tokens
    chunks = [chunk async for chunk in llm.astream("hi", stream_usage=True)]
    assert "".join(chunk.text for chunk in chunks) == "hello 🙂"
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata] == [whole.usage_metadata]


async def test_langchain_calls_a_tool_and_goes_on(edge: Edge) -> None:
    edge.api.jobs.scripts = [says(CALL), says(*CALL), says("It rains.")]
    llm = edge.langchain().bind_tools([WEATHER])
    whole = await llm.ainvoke("Does it rain in Paris?")
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", ARGUMENTS)]
    streamed = AIMessageChunk("")
    async for chunk in llm.astream("Does it rain in Paris?"):
        assert isinstance(chunk, AIMessageChunk)
        streamed += chunk
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("weather", ARGUMENTS)]
    told = ToolMessage("rain", tool_call_id=whole.tool_calls[0]["id"] or "")
    assert (await llm.ainvoke([HumanMessage("Does it rain in Paris?"), whole, told])).content == "It rains."


async def test_langchain_structured_output(edge: Edge) -> None:
    edge.api.jobs.default = says('{"city": "Paris"}')
    schema = {"title": "Place", "description": "a place", **WEATHER["function"]["parameters"]}  # type: ignore[dict-item]
    assert await edge.langchain().with_structured_output(schema, method="json_schema").ainvoke("Where?") == ARGUMENTS
    assert edge.api.jobs.draft.sampling.grammar is not None


async def test_langchain_sees_refusals_and_failures(edge: Edge) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await edge.langchain().bind(model="gpt-4").ainvoke("hi")
    assert unknown.value.code == "model_not_found"
    edge.api.jobs.default = Script([byte_ids("abc")], error=JobFailed("The model failed on this request."))
    with pytest.raises(openai.APIError, match="The model failed"):
        async for _ in edge.langchain().astream("hi"):
            pass


async def test_langchain_over_the_responses_api_gets_a_clear_answer(edge: Edge) -> None:
    """An application without a database has none; it must not look like a broken server."""
    with pytest.raises(openai.NotFoundError):
        await edge.langchain(use_responses_api=True).ainvoke("hi")


async def curl(*arguments: str) -> tuple[int, str]:
    """Its exit code, and what it prints."""
    process = await asyncio.create_subprocess_exec("curl", "-sS", *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, out.decode()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")


def question(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields})


@needs_curl
async def test_curl_whole_and_streamed(edge: Edge, tmp_path: Path) -> None:
    """Also with a body so large that it first asks whether it may send it (`Expect: 100-continue`)."""
    edge.api.jobs.default = says("hel", "lo")
    chat, json_type = f"{edge.base}/chat/completions", ("-H", "Content-Type: application/json")
    large = tmp_path / "body.json"
    large.write_text(question(user="x" * 2_000_000))
    for body in (question(), f"@{large}"):
        code, out = await curl(chat, *json_type, "-d", body)
        assert (code, json.loads(out)["choices"][0]["message"]["content"]) == (0, "hello")
    code, out = await curl("-N", chat, *json_type, "-d", question(stream=True))
    events = [line for line in out.split("\n\n") if line]
    assert (code, events[-1]) == (0, "data: [DONE]")
    assert all(event.startswith("data: ") for event in events)


@needs_curl
async def test_curl_without_a_content_type_is_told_so(edge: Edge) -> None:
    """What it sends by itself is a form's."""
    code, out = await curl("-w", "%{http_code}", f"{edge.base}/chat/completions", "-d", question())
    assert (code, out[-3:]) == (0, "415")
    assert json.loads(out[:-3])["error"]["code"] == "unsupported_media_type"


@needs_curl
async def test_curl_that_is_stopped_stops_the_compute(edge: Edge) -> None:
    edge.api.jobs.default = says("hello", finish=None)
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sSN", f"{edge.base}/chat/completions", "-H", "Content-Type: application/json", "-d", question(stream=True)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    async with asyncio.timeout(LIMIT_S):
        await process.stdout.readuntil(b"hello")
        process.kill()
        await process.wait()
    await until(edge.api.jobs.handles[0].cancelled.is_set, timeout=LIMIT_S)
