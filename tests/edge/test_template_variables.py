"""`chat_template_kwargs`: what a request tells the model's chat template, with every endpoint that renders one."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.job import unpack_ids
from tests.edge.fakes import Api
from tests.edge.sse import read_stream
from tests.edge.test_api_refusals import check
from tests.text.tiny import TEMPLATE, tiny_tokenizer

THINKING = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}(no thoughts){% endif %}"
"""As Qwen3's: it thinks unless it is told not to."""
ON, OFF = "hi\n", "hi\n(no thoughts)"


def prompt(api: Api) -> str:
    """The last job's."""
    return tiny_tokenizer().decode(unpack_ids(api.jobs.draft.prompt))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"enable_thinking": False}, OFF), ({"enable_thinking": True}, ON), ({}, ON), (None, ON), ({"other": [1, None]}, ON)],
)
async def test_a_chat(given: Any, expected: str) -> None:
    api = Api(template=THINKING)
    assert (await api.post(chat_template_kwargs=given)).status_code == 200
    assert prompt(api) == expected
    streamed = await api.post(chat_template_kwargs=given, stream=True)
    assert read_stream(streamed.content).finish == "stop"
    assert prompt(api) == expected


async def test_each_request_has_its_own() -> None:
    """Nothing of a prompt is remembered under its messages alone."""
    api = Api(template=THINKING)
    for off in (False, True, False):
        assert (await api.post(chat_template_kwargs={"enable_thinking": not off} if off else None)).status_code == 200
        assert prompt(api) == (OFF if off else ON)


async def test_the_same_tokens_are_told_by_tokenize() -> None:
    api = Api(template=THINKING)
    for variables in ({}, {"enable_thinking": False}):
        asked = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": variables}
        told = (await api.call("/tokenize", **asked)).json()["tokens"]
        assert (await api.post(**asked)).status_code == 200
        assert told == unpack_ids(api.jobs.draft.prompt)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("x", ""),
        ([], ""),
        (True, ""),
        ({"messages": []}, ".messages"),
        ({"tools": None}, ".tools"),
        ({"add_generation_prompt": False}, ".add_generation_prompt"),
        ({"eos_token": "x"}, ".eos_token"),
        ({"not a name": 1}, ".not a name"),
        ({"": 1}, "."),
        ({"deep": [[1]]}, ".deep"),
        ({"deep": {"a": {"b": 1}}}, ".deep"),
        ({"n": 10**7}, ".n"),
        ({"n": [10**400]}, ".n"),
        ({"n": {"a": -1e300}}, ".n"),
        ({"long": "x" * 8192}, ""),
        ({f"v{number}": number for number in range(2000)}, ""),
    ],
)
async def test_what_is_refused(given: Any, param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": given}
        check(await Api().call(path, **body), 400, param=f"chat_template_kwargs{param}", code="invalid_value")


async def test_what_the_template_makes_of_it_may_be_a_refusal() -> None:
    api = Api(template="{{ raise_exception('no such style') if style == 'x' }}{{ 1 + number }}")
    refused = await api.post(chat_template_kwargs={"style": "x"})
    check(refused, 400, param="messages")
    assert "no such style" in refused.json()["error"]["message"]
    check(await api.post(chat_template_kwargs={"number": "one"}), 400, param="messages")
    assert (await api.post(chat_template_kwargs={"number": 1})).status_code == 200
