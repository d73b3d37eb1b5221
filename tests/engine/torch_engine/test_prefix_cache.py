"""The torch engine with its prefix cache: hits skip the compute, and the tokens stay transformers'."""

from __future__ import annotations

from random import Random
from typing import Any

from schemas.job import Choice, Sampling
from services.engine.protocol import RunSpec
from services.engine.torch_engine.memory import BLOCK_TOKENS
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running


def spec(run: int, prompt: list[int], **sampling: Any) -> RunSpec:
    settings = Sampling(**{"seed": 5, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | sampling)
    return RunSpec(run, tuple(prompt), (Choice(index=0),), settings)


async def test_each_turn_of_a_chat_computes_only_what_is_new(gqa: tiny.Tiny) -> None:
    async with Running(tiny.engine(gqa.files)) as running:
        chat = tiny.prompt(3, 40)
        for turn in range(1, 4):
            (answer,) = await running.generate(spec(turn, chat, max_tokens=18))
            expected = 0 if turn == 1 else (len(chat) - 5 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert running.outputs(turn)[0].cached_tokens == expected
            async with Running(tiny.engine(gqa.files, prefix_cache=False)) as plain:
                assert await plain.generate(spec(turn, chat, max_tokens=18)) == [answer]
                assert plain.outputs(turn)[0].cached_tokens == 0
            chat += [*answer, *tiny.prompt(turn, 5)]


async def test_prompts_that_share_a_beginning_arrive_together_and_later(model: tiny.Tiny) -> None:
    system = tiny.prompt(9, 50)
    prompts = [[*system, *tiny.prompt(number, 7)] for number in range(4)]
    async with Running(tiny.engine(model.files)) as running:
        together = await running.generate(*(spec(run, prompt, ignore_eos=False) for run, prompt in enumerate(prompts)))
        later = await running.generate(*(spec(10 + run, prompt, ignore_eos=False) for run, prompt in enumerate(prompts)))
        assert {running.outputs(10 + run)[0].cached_tokens for run in range(4)} == {48}
    assert together == later == [model.greedy(prompt, 20) for prompt in prompts]


async def test_a_pool_that_cannot_keep_everything(gqa: tiny.Tiny) -> None:
    random = Random(2)
    order = [random.randrange(12) for _ in range(30)]
    answers: dict[int, list[int]] = {}
    async with Running(tiny.engine(gqa.files, kv_blocks=64)) as running:
        for run, seed in enumerate(order):
            (answer,) = await running.generate(spec(run, tiny.prompt(seed, 120), max_tokens=3))
            assert answers.setdefault(seed, answer) == answer
        cached = [running.outputs(run)[0].cached_tokens for run in range(len(order))]
        again = [seed in order[:run] for run, seed in enumerate(order)]
        assert any(cached)
        assert any(known and not hit for known, hit in zip(again, cached, strict=True)), "some were evicted"
        assert running.engine.pool.held == 0
