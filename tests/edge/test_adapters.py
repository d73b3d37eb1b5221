"""`model:adapter`: a LoRA adapter by name, from the request to TensorRT-LLM (its double), whose blocks nobody else finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas.state import Capabilities, Role
from services.edge.selection.policy import without_adapter
from services.settings.selection import SelectionSettings
from tests.edge.fakes import MODEL, Api
from tests.edge.selection.test_policy import NAMES
from tests.edge.stack import stack
from tests.edge.test_api_refusals import check
from tests.edge.test_http import MESSAGES, sdk, served
from tests.engine.trtllm_engine.double import World
from tests.engine.trtllm_engine.rig import build
from tests.engine.trtllm_engine.test_adapters import write_adapter
from tests.waiting import until


@asynccontextmanager
async def with_adapters(world: World, folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    adapters = {name: write_adapter(folder / name) for name in ("sql", "poems")}
    engines = {role: build(world, role, timeout_s=2.0, adapters=adapters) for role in (Role.PREFILL, Role.DECODE)}
    for engine in engines.values():
        await engine.warm_up()
        engine.info = replace(engine.info, model=MODEL)
    async with stack(dict(engines)) as s, served(s.api) as server, sdk(server) as client:
        yield client
        await until(s.clean)


async def test_an_adapter_reaches_both_phases_and_finds_no_blocks_of_another(tmp_path: Path) -> None:
    world = World()
    async with with_adapters(world, tmp_path) as client:
        assert [model.id async for model in client.models.list()] == [MODEL, f"{MODEL}:poems", f"{MODEL}:sql"]
        assert (await client.models.retrieve(f"{MODEL}:sql")).model_dump()["root"] == MODEL
        cached: dict[str, list[int]] = {}
        for _ in range(2):
            for name in (MODEL, f"{MODEL}:sql", f"{MODEL}:poems"):
                asked: dict[str, Any] = {"model": name, "messages": MESSAGES, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
                answer = await client.chat.completions.create(**asked)
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.setdefault(name, []).append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert all(first == 0 for first, _ in cached.values()), "the same prompt, and other blocks"
        assert all(second > 0 for _, second in cached.values())
        for engine in world.engines:
            named = [request.lora.lora_name for request in engine.asked if request.lora is not None]
            assert sorted(named) == ["poems", "poems", "sql", "sql"]
        with pytest.raises(openai.NotFoundError, match="has no adapter 'prose'"):
            await client.chat.completions.create(model=f"{MODEL}:prose", messages=MESSAGES)


async def test_what_is_none_is_refused_by_name() -> None:
    api = Api()
    for name, said in ((f"{MODEL}:sql", "has no adapter"), ("other:sql", "does not exist"), (f"{MODEL}:{'x' * 200}", "does not")):
        refused = await api.post(model=name)
        check(refused, 404, param="model")
        assert said in refused.json()["error"]["message"]
    assert not api.jobs.handles
    api.jobs.capabilities = Capabilities(seed=True, adapters=("sql",))
    answer = await api.post(model=f"{MODEL}:sql")
    assert answer.status_code == 200
    assert (api.jobs.draft.model, api.jobs.draft.adapter) == (MODEL, "sql")
    assert answer.headers["x-headrace-model"] == MODEL
    assert answer.headers["x-headrace-model-reason"] == "named; adapter=sql"
    assert (await api.post()).status_code == 200
    assert api.jobs.draft.adapter is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("a:sql", ("a", "sql")),
        ("fast:sql", ("fast", "sql")),
        ("a", ("a", None)),
        ("a:", ("a", "")),
        (":sql", (":sql", None)),
        ("nobody:sql", ("nobody:sql", None)),
        ("auto:sql", ("auto:sql", None)),
        ("chat:sql", ("chat:sql", None)),
    ],
)
def test_how_a_name_is_read(asked: str, expected: tuple[str, str | None]) -> None:
    assert without_adapter(NAMES, asked) == expected


def test_a_model_whose_own_name_has_a_colon_is_that_model() -> None:
    names = replace(NAMES, models=("a", "a:sql"), selection=SelectionSettings())
    assert without_adapter(names, "a:sql") == ("a:sql", None)
    assert without_adapter(names, "a:sql:x") == ("a:sql", "x")


@pytest.mark.parametrize(
    ("models", "status"), [((MODEL,), 200), ((f"{MODEL}:sql",), 200), ((f"{MODEL}:poems",), 403), ((), 403)], ids=str
)
async def test_a_key_may_list_a_model_or_one_adapter_of_it(models: tuple[str, ...], status: int) -> None:
    api = Api()
    api.jobs.capabilities = Capabilities(seed=True, adapters=("poems", "sql"))
    key = api.keys.make(models=frozenset(models))
    async with api.client() as client:
        body = {"model": f"{MODEL}:sql", "messages": MESSAGES}
        answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
