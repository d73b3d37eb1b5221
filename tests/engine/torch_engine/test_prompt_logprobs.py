"""How likely the prompt's own tokens are, against transformers; in both backends, beside others, whatever the cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job import Choice, Sampling
from schemas.reply import Logprob
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec
from services.engine.scheduler import SCORED
from tests.engine.kernel.conftest import CACHE
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running


@pytest.fixture(params=[None, CACHE], ids=["torch", "kernel"])
def kernels(request: pytest.FixtureRequest) -> Path | None:
    return request.param  # type: ignore[no-any-return]


def engine(model: tiny.Tiny, kernels: Path | None, **settings: Any) -> StepEngine:
    return tiny.engine(model.files, kernels=kernels, **settings)


def spec(run: int, prompt: list[int], *generated: tuple[int, ...], **sampling: Any) -> RunSpec:
    settings = Sampling(**{"seed": 3, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True} | sampling)
    choices = tuple(Choice(index=index, generated=ids) for index, ids in enumerate(generated or ((),)))
    return RunSpec(run, tuple(prompt), choices, settings)


def scored(running: Running, run: int) -> list[Logprob]:
    outputs = [output for report in running.reports for output in report.prompts if output.run == run]
    assert [output.index for output in outputs] == [1 + sum(len(o.logprobs) for o in outputs[:at]) for at in range(len(outputs))]
    assert all(len(output.logprobs) <= SCORED for output in outputs)
    return [logprob for output in outputs for logprob in output.logprobs]


@pytest.fixture(scope="session")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """Weights of the usual size, so that a KV memory in float16 costs no more than it does in a real model."""
    return tiny.make(tmp_path_factory.mktemp("usual"), dtype=torch.float16, initializer_range=0.05)


@pytest.mark.parametrize("length", [1, 2, 16, 33, 100])
async def test_as_transformers_says(usual: tiny.Tiny, kernels: Path | None, length: int) -> None:
    prompt = tiny.prompt(length, length)
    async with Running(engine(usual, kernels)) as running:
        await running.generate(spec(1, prompt, prompt_logprobs=20), spec(2, tiny.prompt(7, 40)))
        ours = scored(running, 1)
        assert scored(running, 2) == []
    assert [logprob.token for logprob in ours] == prompt[1:]
    expected = torch.log_softmax(usual.logits(prompt).double(), dim=-1)
    for position, logprob in enumerate(ours):
        row = expected[position]
        assert logprob.logprob == pytest.approx(row[logprob.token].item(), abs=1e-3)
        assert [value for _, value in logprob.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)
        assert abs(logprob.rank - 1 - int((row > row[logprob.token]).sum())) <= int(
            (row - row[logprob.token]).abs().le(2e-3).sum()
        )
        if logprob.rank <= 20:
            assert logprob.top[logprob.rank - 1] == (logprob.token, logprob.logprob)


async def test_the_cache_is_passed_by_and_filled(gqa: tiny.Tiny) -> None:
    prompt = tiny.prompt(5, 70)
    async with Running(engine(gqa, CACHE)) as running:
        (plain,) = await running.generate(spec(1, prompt))
        assert await running.generate(spec(2, prompt, prompt_logprobs=3)) == [plain]
        assert running.outputs(2)[0].cached_tokens == 0
        assert len(scored(running, 2)) == len(prompt) - 1
    async with Running(engine(gqa, CACHE)) as running:
        assert await running.generate(spec(1, prompt, prompt_logprobs=3)) == [plain]
        assert await running.generate(spec(2, prompt)) == [plain]
        assert running.outputs(2)[0].cached_tokens == 64


async def test_chunks_and_company_change_no_bit(gqa: tiny.Tiny) -> None:
    specs = [spec(run, tiny.prompt(run, 20 + 17 * run), prompt_logprobs=run, temperature=1.0) for run in range(5)]
    alone = []
    async with Running(engine(gqa, CACHE, prefix_cache=False)) as running:
        for one in specs:
            await running.generate(one)
            alone.append((scored(running, one.run), running.tokens(one.run)))
    async with Running(engine(gqa, CACHE, kv_blocks=96, step_tokens=16, speculative_tokens=7)) as running:
        await running.generate(*specs)
        assert [(scored(running, one.run), running.tokens(one.run)) for one in specs] == alone


async def test_several_choices_score_their_prompt_once_and_a_resume_no_answer(gqa: tiny.Tiny) -> None:
    prompt = tiny.prompt(9, 40)
    async with Running(engine(gqa, CACHE)) as running:
        await running.generate(spec(1, prompt, (), (), (), prompt_logprobs=1, temperature=1.0))
        once = scored(running, 1)
        assert [logprob.token for logprob in once] == prompt[1:]
        await running.generate(spec(2, prompt, tuple(running.tokens(1)[:1]), prompt_logprobs=1, temperature=1.0))
        assert scored(running, 2) == once
        await running.generate(spec(3, prompt, (5, 6), (7,), prompt_logprobs=1))
        assert scored(running, 3) == once
