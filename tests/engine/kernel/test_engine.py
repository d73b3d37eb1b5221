"""The step loop over the kernel: tokens as transformers', runs that do not see each other, handoffs, cancels, no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.cores import CoreArbiter
from services.engine.protocol import RunSpec
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import Sequence
from services.engine.torch_engine.build import build
from services.engine.torch_engine.kernel.library import Library
from services.engine.torch_engine.kernel.runner import KernelRunner
from services.settings.worker import WorkerSettings
from tests.engine.kernel.conftest import CACHE, checkpoint, machine
from tests.engine.kernel.rig import NAN
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running, copy_blocks
from tests.waiting import until


def engine(model: tiny.Tiny, **settings: object) -> StepEngine:
    worker = WorkerSettings(**{"kv_blocks": 96, "threads": 2} | settings)  # type: ignore[arg-type]
    return build(model.files, worker, SystemClock(), kernels=CACHE)


def spec(run: int, prompt: list[int], count: int, *, temperature: float = 0.0, seed: int = 7) -> RunSpec:
    sampling = Sampling(seed=seed, max_tokens=count, temperature=temperature, ignore_eos=True)
    return RunSpec(run, tuple(prompt), (Choice(index=0),), sampling)


def test_what_the_engine_says_of_itself(half_gqa: tiny.Tiny) -> None:
    info = engine(half_gqa).info
    assert info.capabilities.exact_resume
    assert info.kv_compat == engine(half_gqa, threads=1, kv_blocks=80).info.kv_compat
    assert info.kv_compat != tiny.engine(half_gqa.files).info.kv_compat


async def test_greedy_tokens_are_those_of_transformers(half_gqa: tiny.Tiny) -> None:
    prompts = [tiny.prompt(seed, length) for seed, length in enumerate([1, 16, 40, 90])]
    async with Running(engine(half_gqa, step_tokens=32)) as running:
        ours = await running.generate(*(spec(run, prompt, 20) for run, prompt in enumerate(prompts)))
    for prompt, tokens in zip(prompts, ours, strict=True):
        theirs = half_gqa.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = theirs[torch.arange(20), torch.tensor(tokens)]
        assert (theirs.max(dim=1).values - chosen < 0.05).all()  # equal, or as good as equal: the KV memory is float16


async def test_seeded_tokens_do_not_depend_on_company_steps_or_threads(half_gqa: tiny.Tiny) -> None:
    random = Random(3)
    specs = [spec(run, tiny.prompt(run, random.randint(1, 80)), random.randint(5, 40), temperature=1.0) for run in range(8)]
    alone = []
    async with Running(engine(half_gqa, threads=1, prefix_cache=False)) as running:
        for one in specs:
            alone += await running.generate(one)
    async with Running(engine(half_gqa, step_tokens=16, max_batch=5)) as running:
        assert await running.generate(*specs) == alone
        assert (
            await running.generate(*(spec(s.run + 10, list(s.prompt), s.sampling.max_tokens, temperature=1.0) for s in specs))
            == alone
        )


async def test_a_handoff_and_a_resume_go_on_with_the_same_tokens(half_gqa: tiny.Tiny) -> None:
    prompt = tiny.prompt(4, 37)
    here, there = engine(half_gqa), engine(half_gqa, threads=1)
    async with Running(here) as prefill, Running(there) as decode:
        whole = (await prefill.generate(spec(1, prompt, 30, temperature=1.0)))[0]
        here.prefill(spec(2, prompt, 30, temperature=1.0))
        first = await prefill.prefilled(2)
        copy_blocks(here, there, 2)
        there.decode(spec(2, prompt, 30, temperature=1.0), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        assert [first.token, *decode.tokens(2)] == whole
        sampling = Sampling(seed=7, max_tokens=30, temperature=1.0, ignore_eos=True)
        resumed = RunSpec(3, tuple(prompt), (Choice(index=0, generated=tuple(whole[:11])),), sampling)
        assert await decode.generate(resumed) == [whole[11:]]


async def test_a_cancelled_step_ends_early_and_its_mates_do_not(tmp_path: Path) -> None:
    deep = checkpoint(tmp_path, torch.float16, num_hidden_layers=400, max_position_embeddings=600)
    async with Running(engine(deep, kv_blocks=120, threads=1, step_tokens=512)) as running:
        running.engine.prefill(spec(1, tiny.prompt(1, 500), 50), then_decode=True)
        await until(lambda: running.engine.stats().running == 1, what="the step")
        running.engine.cancel(1)
        await running.ended(1)
        end = running.end(1)
        assert end is not None
        assert end.state is State.CANCELLED
        assert running.tokens(1) == []
        assert len((await running.generate(spec(2, tiny.prompt(2, 5), 3)))[0]) == 3


async def test_the_runner_stops_the_kernel_once_every_row_is_cancelled(library: Library, tmp_path: Path) -> None:
    deep = checkpoint(tmp_path, torch.float16, num_hidden_layers=400, max_position_embeddings=600)
    with machine(library, deep) as shared:
        tokens = shared.tokens(tiny.prompt(1, 500))
        sequences = [Sequence(spec(1, tokens.ids, 5), 0, tokens.ids, tuple(tokens.blocks), 0, True)]
        runner = KernelRunner(shared.model, cores=CoreArbiter(tmp_path, (0,)), eos_ids=frozenset())
        step = asyncio.create_task(runner.execute(Step((Chunk(sequences[0], 0, 500, samples=True),))))
        await until(lambda: bool((shared.kv[tokens.blocks[0]] != NAN).any()), what="the first layer")
        sequences[0].cancelled = True
        assert await asyncio.wait_for(step, 60) is None
        await runner.close()


def test_torch_is_not_loaded(half_gqa: tiny.Tiny) -> None:
    code = f"""
import sys
from pathlib import Path
from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine import build
from services.engine.torch_engine.kernel.start import load_kernel
assert load_kernel(Path({str(CACHE)!r})) is not None
assert map_checkpoint([Path({str(half_gqa.files.safetensors[0])!r})])
print("torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.strip() == "False"


def test_without_a_compiler_torch_computes(half_gqa: tiny.Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nowhere-cc")
    made = build(half_gqa.files, WorkerSettings(kv_blocks=64), SystemClock(), kernels=tmp_path)
    assert not made.info.capabilities.exact_resume
