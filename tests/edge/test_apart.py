"""n > 1 of a model whose engine computes one choice a run: a job each, one answer. Jobs are scripted; see also tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import openai
import pytest
from msgspec.structs import replace as altered

from schemas.errors import Overloaded
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.api.apart import Apart, take_apart
from services.edge.gate.limits import Limits
from services.edge.jobs.draft import Draft
from services.edge.jobs.handle import JobCancelled
from services.text.grammar import KINDS
from tests.edge.cluster import draft
from tests.edge.fakes import MODEL, Api, FakeHandle, Script, says
from tests.edge.sse import read_stream
from tests.edge.test_api_budgets import running as running_budgets
from tests.edge.test_api_choices import both
from tests.edge.test_api_keys import CHAT, ask
from tests.edge.test_api_refusals import check
from tests.edge.test_http import MESSAGES, running, sdk, served
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

FULL = Overloaded("full", retry_after=2.0)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def api(*scripts: Script, **settings: Any) -> Api:
    made = Api(**settings)
    made.jobs.scripts = list(scripts)
    made.jobs.capabilities = Capabilities(seed=True, logprobs=True, prompt_logprobs=True, grammar=KINDS)
    return made


# one draft a choice


def of(seed: int, n: int) -> Draft:
    one = draft()
    return replace(one, n=n, sampling=altered(one.sampling, seed=seed))


def seeds(drafts: Sequence[Draft]) -> list[int]:
    return [each.sampling.seed for each in drafts]


def test_seeds_differ_and_are_always_the_same() -> None:
    five = take_apart(of(7, 5))
    assert [each.n for each in five] == [1] * 5
    assert seeds(five)[0] == 7, "the first choice is what a request of one choice gets"
    assert len(set(seeds(five))) == 5
    assert all(0 <= seed < 2**64 for seed in seeds(five))
    assert seeds(take_apart(of(7, 2))) == seeds(five)[:2]
    assert not set(seeds(five)) & set(seeds(take_apart(of(8, 5))))
    assert seeds(take_apart(of(2**64 - 1, 2)))[0] == 2**64 - 1


# their handles as one


async def test_a_reader_that_gives_up_loses_nothing() -> None:
    steps, random = 40, Random(1)
    handles = [FakeHandle(draft(), Script([[at] for at in range(steps)], pause_s=0.0002)) for _ in range(3)]
    apart, got = Apart(handles), {choice: list[int]() for choice in range(3)}
    async with asyncio.timeout(PATIENCE_S):
        while any(len(tokens) < steps for tokens in got.values()):
            looking = asyncio.ensure_future(apart.next(PATIENCE_S))
            await asyncio.sleep(random.uniform(0, 0.001))
            looking.cancel()
            await asyncio.wait({looking})
            for delta in () if looking.cancelled() else looking.result():
                got[delta.choice] += delta.tokens
    assert got == {choice: list(range(steps)) for choice in range(3)}
    assert apart.done
    assert await apart.next(PATIENCE_S) == [], "after the end nothing is waited for"


async def test_silence_of_all_is_silence() -> None:
    apart = Apart([FakeHandle(draft(), Script(finish=None)) for _ in range(2)])
    assert await apart.next(0.01) == []
    apart.cancel()
    with pytest.raises(JobCancelled):
        await apart.next(PATIENCE_S)


async def test_what_came_before_a_failure_is_handed_out_before_it() -> None:
    handles = [FakeHandle(draft(), Script([[1], [2]], error=FULL)), FakeHandle(draft(), Script(finish=None))]
    apart, tokens = Apart(handles), list[int]()
    while len(tokens) < 2:
        tokens += [token for delta in await apart.next(PATIENCE_S) for token in delta.tokens]
    assert tokens == [1, 2]
    with pytest.raises(Overloaded):
        await apart.next(PATIENCE_S)
    assert handles[1].cancelled.is_set()


# an answer


async def test_streamed_and_whole_with_a_usage_that_counts_the_prompt_once() -> None:
    made = api(*[says("one", " more"), says("", finish=FinishReason.LENGTH), says("th", "ree")] * 2)
    read, whole = await both(made, 3, seed=5)
    assert {index: (choice.content, choice.finish) for index, choice in read.choices.items()} == {
        0: ("one more", "stop"),
        1: ("", "length"),
        2: ("three", "stop"),
    }
    drafts = [handle.draft for handle in made.jobs.handles[:3]]
    assert [each.n for each in drafts] == [1, 1, 1]
    assert len({handle.id for handle in made.jobs.handles}) == 6
    assert seeds(drafts) == seeds(take_apart(of(5, 3)))
    assert whole["usage"]["prompt_tokens"] == drafts[0].prompt_tokens
    assert whole["usage"]["completion_tokens"] == len("one more") + len("three")


async def test_a_stop_string_ends_its_choice_and_no_other() -> None:
    made = api(*[Script([byte_ids("ab STOP more")], finish=None), says("cd", " efg")] * 2)
    read, whole = await both(made, 2, stop="STOP")
    assert [(read.choices[at].content, read.choices[at].finish) for at in range(2)] == [("ab ", "stop"), ("cd efg", "stop")]
    assert [handle.cancelled.is_set() for handle in made.jobs.handles] == [True, False] * 2
    assert whole["usage"]["completion_tokens"] == len("ab STOP") + len("cd efg")


async def test_each_choice_has_its_own_logprobs_and_its_own_calls() -> None:
    read, _ = await both(api(*[says("a", "c"), says("b")] * 2), 2, logprobs=True, top_logprobs=1)
    assert [[entry["token"] for entry in read.choices[at].logprobs] for at in range(2)] == [["a", "c"], ["b"]]
    made = api(says(CALL), says("no"), says(CALL))
    answer = (await made.post(n=3, tools=TOOLS)).json()
    messages = [choice["message"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]
    assert messages[1]["content"] == "no"
    ids = [message["tool_calls"][0]["id"] for message in (messages[0], messages[2])]
    assert len(set(ids)) == 2


async def test_how_likely_the_prompt_is_is_told_once() -> None:
    answer = (await api(says("a"), says("b")).post(n=2, prompt_logprobs=1)).json()
    alone = (await api(says("a")).post(prompt_logprobs=1)).json()
    assert answer["prompt_logprobs"] == alone["prompt_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_refuses_all(stream: bool) -> None:
    made = api(Script(finish=None), Script(refuse=FULL), Script(admit=asyncio.Event()))
    response = await made.post(n=3, stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert [handle.cancelled.is_set() for handle in made.jobs.handles] == [True, True, True]


async def test_one_that_fails_ends_the_answer_in_band_and_cancels_the_others() -> None:
    made = api(Script([byte_ids("x")], finish=None), Script([byte_ids("y")], error=FULL))
    read = read_stream((await made.post(n=2, stream=True)).content)
    assert read.error is not None
    assert read.error["message"] == "full"
    assert made.jobs.handles[0].cancelled.is_set()


async def test_a_client_that_leaves_cancels_all() -> None:
    made = api(*[Script([byte_ids("x")], finish=None) for _ in range(3)])
    async with served(made) as server, sdk(server) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, stream=True)
        async for _ in stream:
            break
        await running(made)
        await stream.close()
        await until(lambda: all(handle.cancelled.is_set() for handle in made.jobs.handles))


async def test_the_official_sdk_gets_n_choices() -> None:
    made = api(*[says("ze", "ro"), says("one")] * 2)
    async with served(made) as server, sdk(server) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
        assert [(choice.index, choice.message.content) for choice in whole.choices] == [(0, "zero"), (1, "one")]
        stream: openai.AsyncStream[Any] = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "zero", 1: "one"}


async def test_a_request_is_booked_once_for_all_its_jobs() -> None:
    async with running_budgets() as made:
        made.jobs.capabilities = Capabilities(seed=True)
        made.jobs.scripts = [says("one"), says("two"), says("three")]
        key = made.keys.make(tenant_limits=Limits(concurrent=1, tokens_per_day=10_000))
        answer = await ask(made, "/v1/chat/completions", key, body=CHAT | {"n": 3, "max_tokens": 20})
        used = answer.json()["usage"]
        assert used["completion_tokens"] == len("onetwothree")
        await until(lambda: made.usage.entries)
        (entry,) = made.usage.entries.values()
        assert (entry.used.job, entry.used.tokens) == (made.jobs.handles[0].id, used["total_tokens"])
        assert entry.used.compute_s == sum(handle.compute_s for handle in made.jobs.handles)
        await until(lambda: sum(made.usage.spent.values()) == used["total_tokens"])


async def test_several_prompts_with_several_choices_are_numbered_in_order() -> None:
    made = api(says("a"), says("b"), says("c"), says("d"))
    body = (await made.call("/v1/completions", prompt=["one", "three"], n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body["usage"]["prompt_tokens"] == len("one") + len("three")
    assert body["usage"]["completion_tokens"] == 4


async def test_how_many_there_may_be_is_no_question_of_one_pool() -> None:
    made = api(says("a"), says("b"))
    made.jobs.kv_tokens = 100
    assert (await made.post(n=2, max_tokens=90)).status_code == 200
    check(await made.post(n=17), 400, param="n")
    few = api(max_generated_tokens=100)
    check(await few.post(n=2, max_tokens=51), 400, param="n")
