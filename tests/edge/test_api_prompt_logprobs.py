"""`prompt_logprobs` over scripted jobs, in vLLM's form, and of an echoed prompt in OpenAI's older one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.jobs.draft import Delta
from tests.edge.fakes import Api, Script, says
from tests.edge.sse import events
from tests.text.tiny import byte_ids

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hé"}]},
    COMPLETIONS: {"prompt": "say hé"},
}
Table = list[dict[str, dict[str, Any]] | None]


@pytest.fixture
def api() -> Api:
    made = Api()
    made.jobs.capabilities = Capabilities(seed=True, n=True, logprobs=True, prompt_logprobs=True)
    made.jobs.default = says("hel", "lo")
    return made


async def ask(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    response = await api.call(path, **ASKED[path], **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def chunks(api: Api, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await api.call(path, **ASKED[path], stream=True, **fields)
    blocks = events(response.content)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def check(table: Table, api: Api, alternatives: int) -> None:
    """The fake's token n has logprob -n/1000 and rank 5, and the alternatives n, n + 1, …"""
    ids = [logprob.token for logprob in api.jobs.handles[-1].prompt_logprobs]
    assert len(table) == 1 + len(ids) > 3
    assert table[0] is None
    for row, token in zip(table[1:], ids, strict=True):
        assert row is not None
        assert list(row) == [str(token + place) for place in range(max(1, alternatives))]
        assert row[str(token)]["logprob"] == -token / 1000
        assert row[str(token)]["rank"] == (1 if alternatives else 5)
        assert row[str(token)]["decoded_token"] == api.served.text.spell(token)[0]


@pytest.mark.parametrize("alternatives", [0, 1, 20])
async def test_of_a_chat(api: Api, alternatives: int) -> None:
    whole = await ask(api, CHAT, prompt_logprobs=alternatives)
    assert api.jobs.draft.sampling.prompt_logprobs == alternatives
    check(whole["prompt_logprobs"], api, alternatives)
    assert whole["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("usage", [False, True])
async def test_of_a_streamed_chat_with_its_first_event(api: Api, usage: bool) -> None:
    read = await chunks(api, CHAT, prompt_logprobs=2, stream_options={"include_usage": usage})
    check(read[0]["prompt_logprobs"], api, 2)
    assert read[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_logprobs" in chunk for chunk in read[1:])
    assert all(("usage" in chunk) == usage for chunk in read)
    assert read[0].get("usage") is None


async def test_of_several_choices(api: Api) -> None:
    """Of a chat once; of completions with each, as vLLM has it."""
    both = [[Delta(choice, byte_ids("hi"), FinishReason.STOP)] for choice in (1, 0)]
    api.jobs.default = Script(deltas=both)
    check((await ask(api, CHAT, prompt_logprobs=1, n=2))["prompt_logprobs"], api, 1)
    assert sum("prompt_logprobs" in chunk for chunk in await chunks(api, CHAT, prompt_logprobs=1, n=2)) == 1
    for choice in (await ask(api, COMPLETIONS, prompt_logprobs=1, n=2))["choices"]:
        check(choice["prompt_logprobs"], api, 1)


async def test_of_each_completion(api: Api) -> None:
    whole = await ask(api, COMPLETIONS, prompt_logprobs=3)
    check(whole["choices"][0]["prompt_logprobs"], api, 3)
    assert whole["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in whole
    read = await chunks(api, COMPLETIONS, prompt_logprobs=3)
    assert read[0]["choices"][0]["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
    assert [chunk["choices"][0].get("prompt_logprobs") for chunk in read[1:]] == [None] * (len(read) - 1)


async def test_of_an_echo(api: Api) -> None:
    whole = await ask(api, COMPLETIONS, echo=True, logprobs=2)
    choice = whole["choices"][0]
    assert api.jobs.draft.sampling.prompt_logprobs == 2
    assert choice["text"] == "say héhello"
    assert "prompt_logprobs" not in choice
    said = choice["logprobs"]
    prompt = byte_ids("say hé")
    assert said["tokens"] == [api.served.text.spell(token)[0] for token in (*prompt, *byte_ids("hello"))]
    assert said["token_logprobs"] == [None, *(-token / 1000 for token in (*prompt[1:], *byte_ids("hello")))]
    assert said["top_logprobs"][0] is None
    assert [len(top) for top in said["top_logprobs"][1:]] == [2] * (len(prompt) + 4)  # the token is the likeliest
    assert said["text_offset"] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10], "é is two tokens of one character"
    read = await chunks(api, COMPLETIONS, echo=True, logprobs=2)
    columns = [chunk["choices"][0]["logprobs"] for chunk in read if chunk["choices"][0]["logprobs"]]
    assert {name: [value for one in columns for value in one[name]] for name in said} == said
    assert "".join(chunk["choices"][0]["text"] for chunk in read) == choice["text"]


async def test_an_echo_and_a_table_have_their_own_alternatives(api: Api) -> None:
    choice = (await ask(api, COMPLETIONS, echo=True, logprobs=1, prompt_logprobs=4))["choices"][0]
    assert api.jobs.draft.sampling.prompt_logprobs == 4
    check(choice["prompt_logprobs"], api, 4)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}


async def test_a_long_prompt_is_the_same(api: Api) -> None:
    """Written in a thread."""
    ASKED_LONG = {"prompt": [3 + at % 200 for at in range(300)], "prompt_logprobs": 5}
    body = (await api.call(COMPLETIONS, **ASKED_LONG)).json()
    check(body["choices"][0]["prompt_logprobs"], api, 5)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}], ids=["prompt_logprobs", "echo"])
async def test_an_engine_without_it_is_not_asked(api: Api, fields: dict[str, Any]) -> None:
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True)
    response = await api.call(COMPLETIONS, **ASKED[COMPLETIONS], **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))
    assert not api.jobs.handles


async def test_not_without_bounds() -> None:
    api = Api(max_prompt_logprobs=100)
    api.jobs.capabilities = Capabilities(seed=True, prompt_logprobs=True)
    good, bad = [await api.call(COMPLETIONS, prompt=list(range(3, 23)), prompt_logprobs=count) for count in (4, 5)]
    assert good.status_code == 200
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt_logprobs")
