"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.job import unpack_ids
from tests.edge.fakes import CONTEXT, Api
from tests.text.tiny import CONFIG, byte_ids, tiny_prompts

CHAT = [{"role": "user", "content": "hi"}]


async def test_a_text_there_and_back() -> None:
    api = Api()
    text = "hell\N{SMILING FACE WITH OPEN MOUTH} <|user|> hello"
    told = (await api.call("/tokenize", prompt=text, return_token_strs=True)).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == CONTEXT
    assert (await api.call("/detokenize", tokens=told["tokens"])).json() == {"prompt": text}


async def test_messages_are_what_a_chat_would_send() -> None:
    told = (await Api().call("/tokenize", messages=CHAT)).json()
    assert told["tokens"] == tiny_prompts().encode(CHAT)
    assert told["token_strs"] is None


async def test_tools_are_part_of_a_chat() -> None:
    api = Api()
    api.jobs.context = 4096
    tools = [{"type": "function", "function": {"name": "clock"}}]
    told = (await api.call("/tokenize", messages=CHAT, tools=tools)).json()
    assert (await api.post(messages=CHAT, tools=tools)).status_code == 200
    assert told["tokens"] == unpack_ids(api.jobs.draft.prompt)
    assert told["count"] > (await api.call("/tokenize", messages=CHAT)).json()["count"]


async def test_no_worker_is_needed() -> None:
    api = Api()
    api.jobs.served = False
    told = (await api.call("/tokenize", prompt="ab")).json()
    assert told == {"count": 2, "max_model_len": None, "tokens": byte_ids("ab"), "token_strs": None}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ messages }}"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, "tools[0].type"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5, CONFIG["vocab_size"]]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_refusals_name_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    response = await Api().call(path, **fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
