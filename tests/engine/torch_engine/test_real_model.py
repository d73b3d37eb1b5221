"""The default model: the reference of its greedy tokens, and transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.job import Choice, Sampling
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec
from services.engine.torch_engine.build import build
from services.models.store import ModelFiles
from services.settings.worker import WorkerSettings
from tests.engine.kernel.conftest import CACHE
from tests.engine.torch_engine.rig import Running, copy_blocks

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

KUBERNETES = (
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 17012, 593, 37491, 47, 2, 198, 1, 520, 9531, 198),
)
"""'What is Kubernetes?' through the model's chat template: 36 ids."""
ANSWER = [
    *(59, 23385, 37491, 314, 253, 3197, 3941, 338, 6396, 32639, 28, 6636, 7867, 1699, 260, 5594),
    *(30, 657, 506, 253, 7934, 30598, 309, 817, 338, 2518, 2701, 6120, 288, 1658, 335, 260),
]
"""Its greedy answer in float32: made with transformers and, independently, with a second reader of the same file."""

OTHERS = [
    "Write a haiku about rivers.",
    "List three prime numbers greater than 100.",
    "def fibonacci(n):",
    "Übersetze ins Deutsche: The weather is nice today. 😊",
    "Summarise in one sentence: " + "The quick brown fox jumps over the lazy dog. " * 12,
]


@pytest.fixture(scope="module")
def reference(default_model: ModelFiles) -> Any:
    return AutoModelForCausalLM.from_pretrained(default_model.folder, dtype=torch.float32).eval()


def spec(run: int, prompt: tuple[int, ...], count: int) -> RunSpec:
    return RunSpec(run, prompt, (Choice(index=0),), Sampling(seed=0, max_tokens=count, temperature=0.0))


def engine(files: ModelFiles, **settings: Any) -> StepEngine:
    return build(files, WorkerSettings(**{"kv_blocks": 128, "threads": 2} | settings), SystemClock())


async def test_the_reference_prompt_gives_the_reference_tokens(default_model: ModelFiles) -> None:
    """Whole, in chunks beside a running decode, and handed off."""
    here, there = engine(default_model, step_tokens=16), engine(default_model)
    async with Running(here) as prefill, Running(there) as decode:
        assert await decode.generate(spec(1, KUBERNETES, 32)) == [ANSWER]
        assert await prefill.generate(spec(1, KUBERNETES, 32), spec(2, KUBERNETES, 32)) == [ANSWER, ANSWER]
        here.prefill(spec(3, KUBERNETES, 32))
        first = await prefill.prefilled(3)
        copy_blocks(here, there, 3)
        there.decode(spec(3, KUBERNETES, 32), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(3)
        assert [first.token, *decode.tokens(3)] == ANSWER


async def test_five_other_prompts_give_what_transformers_gives(default_model: ModelFiles, reference: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model.folder)
    prompts = [_chat(tokenizer, text) for text in OTHERS]
    async with Running(engine(default_model)) as running:
        ours = await running.generate(*(spec(run, tuple(prompt), 24) for run, prompt in enumerate(prompts)))
    assert ours == [_greedy(reference, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(("kernels", "close"), [(None, 1e-3), (CACHE, 2e-2)], ids=["torch", "kernel with its KV in float16"])
async def test_prompt_logprobs_are_those_of_transformers(
    default_model: ModelFiles, reference: Any, kernels: Path | None, close: float
) -> None:
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=2)
    running = Running(build(default_model, WorkerSettings(kv_blocks=128, threads=2), SystemClock(), kernels=kernels))
    async with running:
        await running.generate(RunSpec(1, KUBERNETES, (Choice(index=0),), sampling))
        ours = [logprob for report in running.reports for output in report.prompts for logprob in output.logprobs]
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([KUBERNETES])).logits[0].double(), dim=-1)
    assert [logprob.token for logprob in ours] == list(KUBERNETES[1:])
    for row, logprob in zip(expected, ours, strict=False):
        assert logprob.logprob == pytest.approx(row[logprob.token].item(), abs=close)
        assert [value for _, value in logprob.top] == pytest.approx(row.topk(2).values.tolist(), abs=close)


async def test_drafts_change_no_token(default_model: ModelFiles) -> None:
    """Greedy and seeded, on the exact kernel."""
    tokenizer = AutoTokenizer.from_pretrained(default_model.folder)
    prompts = [tuple(_chat(tokenizer, text)) for text in (*OTHERS, "Count from 1 to 40, one number a line.")]
    said, accepted = [], []
    for guess in (0, 7):
        settings = WorkerSettings(kv_blocks=256, threads=2, speculative_tokens=guess)
        async with Running(build(default_model, settings, SystemClock(), kernels=CACHE)) as running:
            said.append([])
            for run, prompt in enumerate(prompts):
                sampling = Sampling(seed=run, max_tokens=48, temperature=float(run % 2), top_p=0.9)
                said[-1] += await running.generate(RunSpec(run, prompt, (Choice(index=0),), sampling))
            accepted.append(sum(report.accepted for report in running.reports))
    assert said[0] == said[1]
    assert accepted[1] > accepted[0] == 0


def _chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return list(made[0, len(prompt) :].tolist())
