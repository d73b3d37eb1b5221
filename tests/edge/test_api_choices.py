"""n > 1: choices over scripted jobs, each with its own text, end and log-probabilities."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.jobs.draft import Delta
from tests.edge.fakes import CONTEXT, Api, Script
from tests.edge.sse import Read, read_stream
from tests.edge.test_api_refusals import check
from tests.text.tiny import byte_ids

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def api(*looks: list[Delta], **settings: Any) -> Api:
    made = Api(**settings)
    made.jobs.default = Script(deltas=looks)
    made.jobs.capabilities = Capabilities(seed=True, n=True, logprobs=True)
    return made


def says(choice: int, text: str, finish: FinishReason | None = None) -> Delta:
    return Delta(choice, byte_ids(text), finish)


async def both(made: Api, n: int, **fields: Any) -> tuple[Read, dict[str, Any]]:
    """The same streamed and whole, and what the official SDK's models accept."""
    whole = (await made.post(n=n, **fields)).json()
    streamed = await made.post(n=n, stream=True, stream_options={"include_usage": True}, **fields)
    read = read_stream(streamed.content, usage=True)
    ChatCompletion.model_validate(whole, strict=True)
    for chunk in read.chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert [choice["index"] for choice in whole["choices"]] == list(range(n)) == sorted(read.choices)
    for choice in whole["choices"]:
        streamed_choice = read.choices[choice["index"]]
        assert choice["message"]["content"] == streamed_choice.content
        assert choice["finish_reason"] == streamed_choice.finish
        assert (choice["logprobs"] or {"content": []})["content"] == streamed_choice.logprobs
    assert whole["usage"] == read.usage
    return read, whole


async def test_choices_come_each_at_its_own_pace() -> None:
    made = api(
        [says(1, "one"), says(0, "ze")], [says(2, "", STOP)], [says(0, "ro", LENGTH)], [says(1, " more"), says(1, "!", STOP)]
    )
    read, whole = await both(made, 3)
    assert made.jobs.draft.n == 3
    assert {index: (choice.content, choice.finish) for index, choice in read.choices.items()} == {
        0: ("zero", "length"),
        1: ("one more!", "stop"),
        2: ("", "stop"),
    }
    assert whole["usage"]["completion_tokens"] == len("zero") + len("one more!")
    assert not any(handle.stopped or handle.cancelled.is_set() for handle in made.jobs.handles)


async def test_a_stop_string_ends_its_choice_and_no_other() -> None:
    made = api([says(0, "ab STOP more"), says(1, "cd")], [says(0, "never"), says(1, " efg", LENGTH)])
    read, whole = await both(made, 2, stop="STOP")
    assert (read.choices[0].content, read.choices[0].finish) == ("ab ", "stop")
    assert (read.choices[1].content, read.choices[1].finish) == ("cd efg", "length")
    assert whole["usage"]["completion_tokens"] == len("ab STOP") + len("cd efg")
    assert [handle.stopped for handle in made.jobs.handles] == [[0], [0]]
    assert not any(handle.cancelled.is_set() for handle in made.jobs.handles)


async def test_the_last_choice_stopped_cancels_the_job() -> None:
    made = api([says(0, "STOP"), says(1, "x")], [says(1, "STOP")])
    await both(made, 2, stop="STOP")
    assert all(handle.stopped == [0] and handle.cancelled.is_set() for handle in made.jobs.handles)


async def test_each_choice_has_its_own_logprobs() -> None:
    read, _ = await both(api([says(0, "a"), says(1, "b", STOP)], [says(0, "c", STOP)]), 2, logprobs=True, top_logprobs=1)
    assert [entry["token"] for entry in read.choices[0].logprobs] == ["a", "c"]
    assert [entry["token"] for entry in read.choices[1].logprobs] == ["b"]


async def test_how_many_choices_there_may_be() -> None:
    made = api([says(0, "a", STOP)])
    assert (await made.post(n=1)).status_code == 200
    check(await made.post(n=17), 400, param="n")
    check(await made.post(n=0), 400, param="n")
    few = api([says(choice, "a", STOP) for choice in range(2)], max_choices=2, max_generated_tokens=100)
    check(await few.post(n=3, max_tokens=1), 400, param="n")
    check(await few.post(n=2, max_tokens=51), 400, param="n")
    check(await few.post(n=2), 400, param="n")
    assert (await few.post(n=2, max_tokens=50)).status_code == 200
    few.jobs.default = Script(deltas=[[says(0, "a", STOP)]])
    assert (await few.post(max_tokens=CONTEXT)).status_code == 200, "one choice is bounded by its context"


async def test_choices_that_no_kv_pool_can_hold_are_refused_before_they_begin() -> None:
    made = api([says(choice, "a", STOP) for choice in range(2)])
    made.jobs.kv_tokens = 300
    check(await made.post(n=2, max_tokens=100), 400, param="n")
    assert (await made.post(n=2, max_tokens=20)).status_code == 200
