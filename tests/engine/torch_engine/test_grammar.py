"""Answers of a real (random) model under a grammar, in pure torch and with the C kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from schemas.job import Choice, Grammar, Sampling
from schemas.reply import FinishReason
from services.engine.protocol import RunSpec
from services.text.grammar import KINDS
from tests.engine.kernel.conftest import CACHE
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running, copy_blocks
from tests.text.tiny import END, tiny_tokenizer, tiny_tokenizer_json

LIST = Grammar(kind="regex", source="(red|green|blue)(, (red|green|blue)){2,9}")
OBJECT = Grammar(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
            "required": ["kind", "age"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """With the tiny tokenizer, and logits for more ids than that has."""
    folder = tmp_path_factory.mktemp("model")
    made = tiny.make(folder, vocab_size=300, eos_token_id=END)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return made


@pytest.fixture(params=[None, CACHE], ids=["torch", "kernel"])
def kernels(request: pytest.FixtureRequest) -> Path | None:
    return request.param  # type: ignore[no-any-return]


def spec(run: int, grammar: Grammar | None, *, generated: tuple[int, ...] = (), **sampling: Any) -> RunSpec:
    drawn = Sampling(**{"seed": 5 + run % 10, "max_tokens": 150, "grammar": grammar} | sampling)
    return RunSpec(run, tuple(tiny.prompt(run % 10, 20)), (Choice(index=0, generated=generated),), drawn)


def finish(running: Running, run: int) -> FinishReason | None:
    return running.outputs(run)[-1].finish


async def test_a_mixed_batch(model: tiny.Tiny, kernels: Path | None) -> None:
    free = spec(1, None, max_tokens=40)
    async with Running(tiny.engine(model.files, kernels=kernels)) as running:
        assert running.engine.info.capabilities.grammar == KINDS
        (alone,) = await running.generate(free)
    async with Running(tiny.engine(model.files, kernels=kernels)) as running:
        specs = [free, spec(2, LIST), spec(3, OBJECT), spec(4, LIST, temperature=0.0), spec(5, OBJECT, top_k=3, logprobs=2)]
        answers = await running.generate(*specs)
        assert answers[0] == alone
        texts = [tiny_tokenizer().decode(answer) for answer in answers]
        for run in (2, 4):
            if finish(running, run) is FinishReason.STOP:
                assert re.fullmatch(LIST.source, texts[run - 1])
        for run in (3, 5):
            if finish(running, run) is FinishReason.STOP:
                assert json.loads(texts[run - 1])["kind"] in ("cat", "dog")
        assert any(finish(running, run) is FinishReason.STOP for run in range(2, 6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_handoff_and_a_resume_change_no_token(model: tiny.Tiny, kernels: Path | None, temperature: float) -> None:
    kind = {"temperature": temperature}
    async with (
        Running(tiny.engine(model.files, kernels=kernels)) as prefill,
        Running(tiny.engine(model.files, kernels=kernels)) as decode,
    ):
        (whole,) = await prefill.generate(spec(1, LIST, **kind))
        prefill.engine.prefill(spec(11, LIST, seed=6, **kind))
        first = await prefill.prefilled(11)
        copy_blocks(prefill.engine, decode.engine, 11)
        decode.engine.decode(spec(11, LIST, seed=6, **kind), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(11)
        assert [first.token, *decode.tokens(11)] == whole
        for run, done in ((21, 1), (31, len(whole) // 2), (41, len(whole) - 1)):
            (rest,) = await decode.generate(spec(run, LIST, generated=tuple(whole[:done]), seed=6, **kind))
            assert whole[:done] + rest == whole


async def test_each_of_several_choices_has_its_own_place(model: tiny.Tiny, kernels: Path | None) -> None:
    """They draw their first tokens in one step, from the same logits."""
    drawn = Sampling(seed=5, max_tokens=150, grammar=LIST)
    several = RunSpec(1, tuple(tiny.prompt(1, 20)), tuple(Choice(index=index) for index in range(3)), drawn)
    async with Running(tiny.engine(model.files, kernels=kernels)) as running:
        await running.generate(several)
        for choice in range(3):
            outputs = [output for output in running.outputs(1) if output.choice == choice]
            text = tiny_tokenizer().decode([output.token for output in outputs])
            assert re.fullmatch(LIST.source, text) or outputs[-1].finish is FinishReason.LENGTH
            assert re.match("red|green|blue", text)
