"""What other models and servers (vLLM, SGLang) read: honoured or refused by name, never ignored where it changes an answer."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.job import Tier
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.api.extras import OF_CHAT, OF_TEXT
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.sse import read_stream
from tests.edge.test_api_logprobs import joined
from tests.edge.test_api_refusals import check
from tests.text.tiny import byte_ids

CHANGING: dict[str, Any] = {
    "length_penalty": 2.0,
    "top_a": 0.5,
    "tfs": 0.9,
    "typical_p": 0.9,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= a",
    "structured_outputs": {"regex": "a+"},
    "truncate_prompt_tokens": 4,
    "add_generation_prompt": False,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "logits_processors": ["x"],
    "reasoning_effort": "low",
    "verbosity": "low",
}
"""Where `True` would not do."""


@pytest.mark.parametrize("name", OF_CHAT)
async def test_a_chat_refuses_what_would_change_it(name: str) -> None:
    value = CHANGING.get(name, True)
    check(await Api().post(**{name: value}), 400, param=name, code="unsupported_parameter")


async def test_nor_does_a_chat_choose_the_best_of_several() -> None:
    check(await Api().post(best_of=2), 400, param="best_of", code="unsupported_parameter")


@pytest.mark.parametrize("name", OF_TEXT)
async def test_so_does_a_completion(name: str) -> None:
    value = False if name == "add_special_tokens" else CHANGING.get(name, True)
    check(await Api().call("/v1/completions", prompt="x", **{name: value}), 400, param=name, code="unsupported_parameter")


async def test_a_value_that_changes_nothing_is_as_good_as_none() -> None:
    for extras, path, prompt in (
        (OF_CHAT, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        (OF_TEXT, "/v1/completions", {"prompt": "hi"}),
    ):
        for at in range(5):
            neutral = {name: values[at % len(values)] for name, values in extras.items()}
            assert (await Api().call(path, **prompt, **neutral, best_of=1, priority=3, cache_salt="s")).status_code == 200


@pytest.mark.parametrize("cuts", [["aENDb"], ["a", "E", "N", "Db"], ["aEN", "D"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stop_string_stays_if_it_is_to(path: str, cuts: list[str]) -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True)
    api.jobs.default = says(*cuts, finish=FinishReason.LENGTH)
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    for keep, expected in ((True, "aEND"), (False, "a"), (None, "a")):
        asked = {**prompt, "stop": ["END"], "include_stop_str_in_output": keep}
        whole = (await api.call(path, **asked)).json()["choices"][0]
        streamed = read_stream((await api.call(path, **asked, stream=True)).content)
        text = whole["text"] if "text" in whole else whole["message"]["content"]
        assert (text, streamed.content, whole["finish_reason"], streamed.finish) == (expected, expected, "stop", "stop")


async def test_what_is_kept_has_its_logprobs() -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, logprobs=True)
    api.jobs.default = says("aEN", "Db")
    choice = (await api.post(stop="END", include_stop_str_in_output=True, logprobs=True)).json()["choices"][0]
    assert joined(choice["logprobs"]["content"]).decode() == choice["message"]["content"] == "aEND"


async def test_stop_tokens_go_to_the_engine() -> None:
    api = Api()
    assert (await api.post(stop_token_ids=[7, 9])).status_code == 200
    assert api.jobs.draft.sampling.stop_token_ids == (7, 9)
    check(await api.post(stop_token_ids=[1, 2**31]), 400, param="stop_token_ids[1]")
    check(await api.post(stop_token_ids=[-1]), 400, param="stop_token_ids[0]")
    check(await api.post(stop_token_ids=[1] * 65), 400, param="stop_token_ids")


@pytest.mark.parametrize(("tier", "told"), [(Tier.ENTERPRISE, "priority"), (Tier.PAID, "default"), (Tier.FREE, "flex")])
async def test_the_tier_is_told_in_openais_words_whatever_was_asked_for(tier: Tier, told: str) -> None:
    api = Api()
    headers = {"authorization": f"Bearer {api.keys.make(tier=tier)}"}
    api.jobs.default = Script([byte_ids("a"), byte_ids("b")])
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "service_tier": "auto"}
    async with api.client() as client:
        whole = await client.post("/v1/chat/completions", json=body, headers=headers)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/v1/chat/completions", json=body | usage, headers=headers)
    assert whole.json()["service_tier"] == told
    assert {chunk["service_tier"] for chunk in read_stream(streamed.content, usage=True).chunks} == {told}
    check(await api.post(service_tier=5), 400, param="service_tier")
