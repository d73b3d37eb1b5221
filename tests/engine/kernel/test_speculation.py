"""Speculative decoding on the exact kernel: the same tokens, log-probabilities and finishes with drafts and without."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from schemas.job import Choice, Grammar, Sampling
from schemas.reply import FinishReason, Logprob
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec
from tests.engine.kernel.conftest import CACHE
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running, copy_blocks
from tests.text.tiny import END, tiny_tokenizer_json

FEW = dict.fromkeys((65, 66, 67, 68), 100.0)
"""With four ids to draw from, guesses are often right and often wrong, also in what is drawn by chance."""
LIST = Grammar(kind="regex", source="((red|green|blue)(, )?){2,40}")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2},
    {"stop_token_ids": (66,), "min_tokens": 9},
    {"logit_bias": {}, "grammar": LIST, "temperature": 0.0},
    {"logit_bias": {}, "grammar": LIST, "logprobs": 1},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    folder = tmp_path_factory.mktemp("speculating")
    made = tiny.make(folder, vocab_size=300, eos_token_id=END)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return made


def engine(model: tiny.Tiny, guess: int, **settings: Any) -> StepEngine:
    return tiny.engine(model.files, kernels=CACHE, speculative_tokens=guess, **{"kv_blocks": 128} | settings)


def spec(run: int, prompt: list[int], *generated: list[int], **sampling: Any) -> RunSpec:
    settings = Sampling(**{"seed": 7, "max_tokens": 40, "temperature": 1.0, "logit_bias": FEW} | sampling)
    choices = tuple(Choice(index=index, generated=tuple(ids)) for index, ids in enumerate(generated or ([],)))
    return RunSpec(run, tuple(prompt), choices, settings)


Said = dict[int, list[tuple[int, int, Logprob | None, FinishReason | None]]]


def said(running: Running, run: int) -> Said:
    found: Said = {}
    for output in running.outputs(run):
        found.setdefault(output.choice, []).append((output.index, output.token, output.logprob, output.finish))
    return found


def right(running: Running) -> int:
    return sum(report.accepted for report in running.reports)


def steps(running: Running) -> int:
    """That drew; how many others a prompt takes is the machine's affair."""
    return sum(bool(report.tokens) for report in running.reports)


@pytest.mark.parametrize("number", range(6))
async def test_drafts_change_nothing_but_the_number_of_steps(model: tiny.Tiny, number: int) -> None:
    random = Random(number)
    specs = []
    for run in range(6):
        prompt = tiny.prompt(10 * number + run, random.randint(1, 60))
        n = random.choice([1, 1, 1, 3])
        specs.append(spec(run, prompt, *[[]] * n, seed=run, max_tokens=random.randint(1, 60), **random.choice(KINDS)))
    async with Running(engine(model, 0)) as plain, Running(engine(model, 7, threads=2)) as guessing:
        for one in specs:
            await plain.generate(one)
            await guessing.generate(one)
        for run in range(len(specs)):
            assert said(guessing, run) == said(plain, run)
            assert guessing.end(run) == plain.end(run)
        assert right(guessing) > 0
        assert steps(guessing) < steps(plain)
    async with Running(engine(model, 3, step_tokens=16)) as together:
        await together.generate(*specs)
        assert all(said(together, run) == said(plain, run) for run in range(len(specs)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_a_handoff_and_a_resume_go_on_with_the_same_tokens(model: tiny.Tiny, kind: dict[str, Any]) -> None:
    prompt = tiny.prompt(5, 21)
    async with (
        Running(engine(model, 0)) as plain,
        Running(engine(model, 7)) as prefill,
        Running(engine(model, 7)) as decode,
    ):
        (whole,) = await plain.generate(spec(1, prompt, **kind))
        prefill.engine.prefill(spec(2, prompt, **kind))
        first = await prefill.prefilled(2)
        copy_blocks(prefill.engine, decode.engine, 2)
        decode.engine.decode(spec(2, prompt, **kind), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        assert [first.token, *decode.tokens(2)] == whole
        for run, had in ((3, 1), (4, len(whole) // 2)):
            (rest,) = await decode.generate(spec(run, prompt, whole[:had], **kind))
            assert whole[:had] + rest == whole


async def test_what_was_cached_beside_wrong_guesses_is_right(model: tiny.Tiny) -> None:
    """The next turn of a chat takes the blocks of a speculated answer."""
    prompt = tiny.prompt(6, 30)
    async with Running(engine(model, 7)) as guessing, Running(engine(model, 0, prefix_cache=False)) as plain:
        (answer,) = await guessing.generate(spec(1, prompt, max_tokens=60))
        turn = spec(2, [*prompt, *answer, 9, 8, 7], max_tokens=30)
        assert await guessing.generate(turn) == await plain.generate(turn)
        assert guessing.outputs(2)[0].cached_tokens >= len(prompt) + len(answer) - 16


async def test_a_repetition_is_guessed(model: tiny.Tiny) -> None:
    async with Running(engine(model, 7)) as running:
        await running.generate(spec(1, tiny.prompt(8, 12), logit_bias={65: 100.0}, max_tokens=80))
        assert set(running.tokens(1)) == {65}
        assert right(running) == sum(report.drafted for report in running.reports) > 60
        assert steps(running) < 20
