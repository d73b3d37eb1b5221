"""Sampling over a real model, pure torch and kernel: choices, penalties and log-probabilities, through handoffs and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from schemas.reply import Logprob
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec
from tests.engine.kernel.conftest import CACHE
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running, copy_blocks

HARSH = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9}
COUNT = 18


@pytest.fixture(params=[None, CACHE], ids=["torch", "kernel"])
def kernels(request: pytest.FixtureRequest) -> Path | None:
    return request.param  # type: ignore[no-any-return]


def engine(model: tiny.Tiny, kernels: Path | None, **settings: Any) -> StepEngine:
    return tiny.engine(model.files, kernels=kernels, **settings)


def spec(run: int, prompt: list[int], *choices: tuple[int, tuple[int, ...]], **sampling: Any) -> RunSpec:
    """`choices`: index and what it has generated."""
    settings = Sampling(**{"seed": 11, "max_tokens": COUNT, "temperature": 1.0, "ignore_eos": True} | sampling)
    return RunSpec(run, tuple(prompt), tuple(Choice(index=i, generated=ids) for i, ids in choices), settings)


def by_choice(running: Running, run: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in running.outputs(run):
        found.setdefault(output.choice, []).append(output.token)
    return found


async def several(running: Running, what: RunSpec) -> dict[int, list[int]]:
    running.engine.prefill(what, then_decode=True)
    await running.ended(what.run)
    end = running.end(what.run)
    assert end is not None
    assert end.state is State.FINISHED
    return by_choice(running, what.run)


FOUR = tuple((index, ()) for index in range(4))


@pytest.mark.parametrize("length", [5, 16, 37])
async def test_four_choices_are_four_runs(gqa: tiny.Tiny, kernels: Path | None, length: int) -> None:
    """With penalties, so that each choice's own history counts; alone, together, handed over, and resumed from anywhere."""
    prompt = tiny.prompt(length, length)
    here, there = engine(gqa, kernels), engine(gqa, kernels)
    async with Running(here) as prefill, Running(there) as decode:
        alone = {i: (await several(prefill, spec(10 + i, prompt, (i, ()), **HARSH)))[i] for i in range(4)}
        assert len({tuple(tokens) for tokens in alone.values()}) == 4
        assert await several(prefill, spec(1, prompt, *FOUR, **HARSH)) == alone

        apart = spec(2, prompt, *FOUR, **HARSH)
        here.prefill(apart)
        await prefill.prefilled(2)
        first = tuple(FirstToken(choice=o.choice, index=o.index, token=o.token) for o in prefill.outputs(2))
        copy_blocks(here, there, 2)
        there.decode(apart, first, cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        rest = by_choice(decode, 2)
        assert {token.choice: [token.token, *rest[token.choice]] for token in first} == alone

        had = ((0, tuple(alone[0][:1])), (2, ()), (3, tuple(alone[3][: COUNT - 1])))
        resumed = await several(decode, spec(3, prompt, *had, **HARSH))
        assert resumed == {0: alone[0][1:], 2: alone[2], 3: alone[3][COUNT - 1 :]}


async def test_penalties_change_the_answer_and_survive_a_resume(gqa: tiny.Tiny, kernels: Path | None) -> None:
    prompt = tiny.prompt(3, 20)
    async with Running(engine(gqa, kernels)) as running:
        (plain,) = await running.generate(spec(1, prompt, (0, ()), temperature=0.0))
        (whole,) = await running.generate(spec(2, prompt, (0, ()), temperature=0.0, **HARSH))
        assert whole != plain
        (rest,) = await running.generate(spec(3, prompt, (0, tuple(whole[:7])), temperature=0.0, **HARSH))
        assert whole[:7] + rest == whole
        banned = whole[0]
        (other,) = await running.generate(spec(4, prompt, (0, ()), temperature=0.0, logit_bias={banned: -100.0}))
        assert banned not in other


async def test_batch_mates_do_not_matter_whatever_they_ask_for(gqa: tiny.Tiny) -> None:
    """On the exact kernel. Torch sums in another order in other batches."""
    asked: list[dict[str, Any]] = [
        {},
        HARSH,
        {"temperature": 0.0},
        {"top_k": 3, "logprobs": 4},
        {"min_p": 0.2, "logit_bias": {5: 3.0}},
        {"top_p": 0.5, "seed": 4},
    ]
    specs = [spec(run, tiny.prompt(run, 9 + run), *FOUR[: 1 + run % 3], **kind) for run, kind in enumerate(asked)]
    async with Running(engine(gqa, CACHE)) as running:
        for each in specs:
            running.engine.prefill(each, then_decode=True)
        await running.ended(*range(len(specs)))
        together = [[(o.choice, o.token, o.logprob) for o in running.outputs(run)] for run in range(len(specs))]
    for run, each in enumerate(specs):
        async with Running(engine(gqa, CACHE)) as running:
            await several(running, each)
            mine = [(o.choice, o.token, o.logprob) for o in running.outputs(run)]
            assert sorted(mine, key=lambda o: o[0]) == sorted(together[run], key=lambda o: o[0])


async def test_logprobs_are_those_of_transformers(gqa: tiny.Tiny) -> None:
    """The model's own, whatever temperature, penalties and filters do; of each choice under its own past."""
    prompt = tiny.prompt(4, 21)
    async with Running(engine(gqa, None)) as running:
        found = await several(running, spec(1, prompt, *FOUR[:3], logprobs=20, temperature=1.4, top_k=30, **HARSH))
        logprobs: dict[int, list[Logprob]] = {}
        for output in running.outputs(1):
            assert output.logprob is not None
            logprobs.setdefault(output.choice, []).append(output.logprob)
    for choice, tokens in found.items():
        expected = torch.log_softmax(gqa.logits([*prompt, *tokens])[len(prompt) - 1 : -1].double(), dim=-1)
        for row, (token, ours) in enumerate(zip(tokens, logprobs[choice], strict=True)):
            assert ours.token == token
            assert ours.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
            best = expected[row].topk(20)
            assert [value for _, value in ours.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert sorted(ours.top, key=lambda one: -one[1]) == list(ours.top)
            assert sum(math.exp(value) for _, value in ours.top) <= 1.0 + 1e-6
