"""Two models in one stack of real processes, with aliases, `auto` and fallback, through the official SDK."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.chaos.processes import kill
from tests.e2e.conftest import READY_S, UP
from tests.e2e.operator import operator
from tests.e2e.running import Up, started
from tests.text.tiny import CONFIG, TEMPLATE, write_tiny_model_folder

SELECTION = """
[selection.aliases]
fast = "little"
chat = "auto"

[selection.auto]
small = "fast"
large = "grand"

[[selection.auto.rules]]
use = "large"
code = true

[[selection.auto.rules]]
use = "large"
min_characters = 300

[[selection.auto.rules]]
use = "large"
min_turns = 3

[[selection.auto.rules]]
use = "large"
tools = true

[[selection.auto.rules]]
use = "large"
hint = "legal"

[selection.fallback.grand]
to = ["fast"]
on = ["no_worker", "no_capacity"]

[selection.fallback.little]
to = ["grand"]
on = ["context_length"]
"""
HI: Any = [{"role": "user", "content": "hi"}]
CODE = "What is wrong?\n```\nx = 1\n```"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("models")
    little, grand = (write_tiny_model_folder(folder / name) for name in ("little", "grand"))
    (grand / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 2048}))
    about = json.loads((grand / "tokenizer_config.json").read_text())
    about["chat_template"] = "{{ 'a template of its own: ' }}" + TEMPLATE
    (grand / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "headrace.toml").write_text(SELECTION)
    argv = [*UP, "--engine", "scripted", "--model", str(little), "--model", str(grand)]
    with started(argv, folder / "home", folder, env={"HEADRACE_CONFIG": str(folder / "headrace.toml")}) as up:
        up.wait_ready(READY_S)
        yield up
        assert not up.violations, up.violations


def sdk(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(up: Up, model: str, messages: Any = HI, **fields: Any) -> tuple[str, str, dict[str, str]]:
    """The model of the answer, the one in the headers, and all headers."""
    with sdk(up) as client:
        fields = {"max_tokens": 4, **fields}
        raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, **fields)
        return raw.parse().model, raw.headers["x-headrace-model"], dict(raw.headers)


def turns(count: int) -> list[dict[str, str]]:
    both = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return (both * count)[:-1]


def test_each_model_has_pools_and_a_template_of_its_own(up: Up) -> None:
    assert up.model == "little, grand"
    assert ask(up, "little")[:2] == ("little", "little")
    assert ask(up, "grand")[:2] == ("grand", "grand")
    counts = {
        model: httpx.post(f"{up.url}/tokenize", json={"model": model, "messages": HI}, timeout=60).json()
        for model in ("little", "grand")
    }
    assert counts["grand"]["count"] > counts["little"]["count"] + 10
    assert (counts["little"]["max_model_len"], counts["grand"]["max_model_len"]) == (512, 2048)


async def test_an_operator_sees_both(up: Up) -> None:
    async with operator(up) as op:
        workers = [*await op.found("prefill", 2), *await op.found("decode", 2)]
        assert len(workers) == 4
        assert {Path(service["metadata"]["model"]).name for service in workers} == {"little", "grand"}
        [edge] = await op.found("edge", 1)
        assert edge["metadata"]["model"] == "little,grand"


def test_what_is_listed(up: Up) -> None:
    with sdk(up) as client:
        assert [model.id for model in client.models.list()] == ["little", "grand", "fast", "chat", "auto"]


def test_an_alias(up: Up) -> None:
    model, told, headers = ask(up, "fast")
    assert (model, told, headers["x-headrace-model-reason"]) == ("little", "little", "alias")


@pytest.mark.parametrize(
    ("fields", "model", "rule"),
    [
        ({}, "little", "default"),
        ({"messages": [{"role": "user", "content": CODE}]}, "grand", "code"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "grand", "length"),
        ({"messages": turns(3)}, "grand", "depth"),
        ({"tools": [TOOL]}, "grand", "tools"),
        ({"extra_headers": {"x-headrace-hint": "legal"}}, "grand", "hint"),
        ({"metadata": {"headrace_hint": "large"}}, "grand", "hint"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "chat"])
def test_auto_by_each_rule(up: Up, name: str, fields: dict[str, Any], model: str, rule: str) -> None:
    found, told, headers = ask(up, name, **{"messages": HI, **fields})
    size = "large" if model == "grand" else "small"
    assert (found, told, headers["x-headrace-model-reason"]) == (model, model, f"auto; size={size}; rule={rule}")


def test_a_prompt_that_is_too_long_for_one_of_them(up: Up) -> None:
    model, _, headers = ask(up, "little", [{"role": "user", "content": "x" * 900}])
    assert (model, headers["x-headrace-fallback"]) == ("grand", "little; reason=context_length")


def test_responses_and_completions(up: Up) -> None:
    with sdk(up) as client:
        response = client.responses.with_raw_response.create(model="auto", input=CODE, max_output_tokens=4)
        assert response.headers["x-headrace-model"] == response.parse().model == "grand"
        text = client.completions.with_raw_response.create(model="fast", prompt="hi", max_tokens=4)
        assert text.headers["x-headrace-model"] == text.parse().model == "little"


def test_a_pool_that_is_killed(up: Up, tmp_path: Path) -> None:
    """While it is away the other model answers and says so, at once and later; then it is back."""
    grand = next(Path(up.home.parent).glob("grand"))
    aside = grand.rename(tmp_path / "aside")  # so that no worker of it starts again
    try:
        for name in ("p2", "d2"):
            kill(up, name)
        until(lambda: streamed(up, "grand") == "little (grand; reason=no_worker)")
        began = time.monotonic()
        while time.monotonic() < began + 5:  # over the moment at which the edge forgets the model's card
            assert streamed(up, "grand") == "little (grand; reason=no_worker)"
        assert ask(up, "auto", [{"role": "user", "content": CODE}])[0] == "little"
        assert ask(up, "little")[0] == "little"
        text = httpx.get(f"{up.admin_url}/metrics", timeout=60).text
        assert 'headrace_model_fallbacks_total{model="grand",reason="no_worker",to="little"}' in text
    finally:
        aside.rename(grand)
    until(lambda: streamed(up, "grand") == "grand ()")
    assert ask(up, "auto", [{"role": "user", "content": CODE}])[0] == "grand"


def streamed(up: Up, model: str) -> str:
    """Who answers, and what is told of the others. A refusal is told as it is."""
    body = {"model": model, "messages": HI, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=60) as response:
        text = response.read().decode()
    if response.status_code != 200:
        return f"{response.status_code} {text}"
    models = {json.loads(line[6:]).get("model", line) for line in text.splitlines() if line.startswith("data: {")}
    assert models == {response.headers["x-headrace-model"]}, text
    return f"{response.headers['x-headrace-model']} ({response.headers.get('x-headrace-fallback', '')})"


def until(condition: Any, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
