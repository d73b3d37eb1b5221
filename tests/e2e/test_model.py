"""The real model through the whole pipeline, against the reference ids and against transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.models.store import ModelFiles
from tests.e2e.conftest import READY_S, UP
from tests.e2e.operator import operator
from tests.e2e.running import Up, started

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

REFERENCE = (
    "Kubernetes is a software platform that enables scalable, distributed computing across the internet. "
    "It's a container orchestration system that allows multiple machines to run on the"
)
PROMPTS = (
    "Name three colours.",
    "Write one sentence about rivers.",
    "def fibonacci(n):",
    "Was ist die Hauptstadt von Frankreich?",
    "1 2 3 4 5 6",
)
MARGIN = 1e-3
"""Below this distance between the two best logits, float32 in another batch may choose the other one."""


@dataclass(frozen=True)
class Solo:
    """What transformers generates alone: ids, and the distance of the best logit from the second at each."""

    ids: list[int]
    margins: list[float]


class Reference:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)

    def solo(self, prompt: str, max_tokens: int) -> Solo:
        messages = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            done = self.model.generate(
                **encoded, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        best = [torch.topk(logits[0], 2).values for logits in done.logits]
        ids = done.sequences[0, encoded["input_ids"].shape[1] :].tolist()
        return Solo(ids, [float(top[0] - top[1]) for top in best])

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference(default_model: ModelFiles) -> Iterator[Reference]:
    """On one thread. Several wait for each other at every step: minutes, where other processes have the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference(default_model.folder)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def up(default_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with _stack(default_model, tmp_path_factory) as running:
        yield running


@contextmanager
def _stack(files: ModelFiles, factory: pytest.TempPathFactory, *arguments: str) -> Iterator[Up]:
    folder = factory.mktemp("stack")
    with started([*UP, "--model", str(files.folder), *arguments], folder / "home", folder) as running:
        running.wait_ready(READY_S)
        yield running
        assert not running.violations, running.violations


async def ask(up: Up, prompt: str, max_tokens: int) -> str:
    async with httpx.AsyncClient(base_url=up.url, timeout=300) as client:
        body: dict[str, Any] = {
            "model": up.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


async def test_the_reference_ids(up: Up) -> None:
    assert await ask(up, "What is Kubernetes?", 32) == REFERENCE


async def test_other_prompts_equal_transformers(up: Up, reference: Reference) -> None:
    for prompt in PROMPTS:
        assert await ask(up, prompt, 20) == reference.text(reference.solo(prompt, 20).ids)


def test_the_official_sdk(up: Up) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)
    question: list[Any] = [{"role": "user", "content": "What is Kubernetes?"}]
    stream = client.chat.completions.create(
        model=up.model, messages=question, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REFERENCE
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (36, 32)
    whole = client.chat.completions.create(model=up.model, messages=question, temperature=0, max_tokens=32)
    assert whole.choices[0].message.content == REFERENCE
    with pytest.raises(openai.NotFoundError) as wrong_model:
        client.chat.completions.create(model="no-such-model", messages=question)
    assert wrong_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong_value:
        client.chat.completions.create(model=up.model, messages=question, temperature=3)
    assert wrong_value.value.param == "temperature"


def test_a_call_that_must_come_comes(up: Up) -> None:
    """A small model calls when it has to, and its arguments keep to the schema."""
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": schema | {"additionalProperties": False}}}
    ask: dict[str, Any] = {
        "model": up.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [weather],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    streamed = [
        delta for chunk in client.chat.completions.create(**ask, stream=True) for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(delta.function.arguments for delta in streamed) == call.function.arguments
    told = [{"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    told.append({"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 degrees."})
    ask |= {"messages": [*ask["messages"], *told], "tool_choice": "none"}
    assert client.chat.completions.create(**ask).choices[0].message.content


def test_raw_text_goes_on(up: Up) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)
    ask: dict[str, Any] = {"model": up.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
    whole = client.completions.create(**ask).choices[0].text
    assert "Paris" in whole
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)) == whole


def test_an_answer_keeps_to_its_schema(up: Up) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"type": "string", "maxLength": 30}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema, "strict": True}}
    question: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    ask = {"model": up.model, "messages": question, "temperature": 0, "max_tokens": 60, "response_format": wanted}
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "stop"
    answer = json.loads(whole.message.content or "")
    assert answer.keys() == {"city", "country"}
    assert "Paris" in answer["city"]
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", [("--prefill", "2", "--decode", "2"), ("--both", "1")])
async def test_other_shapes_give_the_same(
    arguments: tuple[str, ...], default_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory, reference: Reference
) -> None:
    with _stack(default_model, tmp_path_factory, *arguments) as running:
        assert await ask(running, "What is Kubernetes?", 32) == REFERENCE
        answers = await asyncio.gather(*(ask(running, prompt, 20) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            _equal_up_to_a_tie(reference, reference.solo(prompt, 20), answer)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sixteen_chats_at_once_get_the_tokens_they_get_alone(
    up: Up, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [(f"{PROMPTS[number % 5]} " + "And why? " * number, 8 + 2 * number) for number in range(16)]
    answers = await asyncio.gather(*(ask(up, prompt, length) for prompt, length in chats))
    excused = sum(
        _equal_up_to_a_tie(reference, reference.solo(prompt, length), answer)
        for (prompt, length), answer in zip(chats, answers, strict=True)
    )
    with capsys.disabled():
        print(f"\n{excused} of {len(chats)} chats left their solo run at a tie (margin below {MARGIN})", file=sys.stderr)
    async with operator(up) as op:
        await op.assert_clean()


def _equal_up_to_a_tie(reference: Reference, solo: Solo, answer: str) -> bool:
    """Whether `answer` left the solo run, which it may only where two logits are as good as equal."""
    if answer == reference.text(solo.ids):
        return False
    agreed = max(
        count for count in range(len(solo.ids) + 1) if answer.startswith(reference.text(solo.ids[:count]).rstrip("\ufffd"))
    )
    margins = solo.margins[max(0, agreed - 1) : agreed + 1]
    assert min(margins) < MARGIN, f"differs after {agreed} tokens, where the margin is {margins}: {answer!r}"
    return True
