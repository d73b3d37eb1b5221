"""Every model family this engine says it computes, in both backends, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen3Config

from schemas.job import Choice, Sampling
from services.engine.protocol import RunSpec
from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.library import DType, Library
from tests.engine.kernel.conftest import CACHE, library
from tests.engine.kernel.rig import Machine, tensors_in
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running
from tests.engine.torch_engine.test_model import Bench

__all__ = ["library"]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""With the contexts of a tiny model, so that waves of all three sorts are among those of a head of 16."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama 2": {"num_key_value_heads": 6},
    "llama 3.1": {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
    "llama 3.2": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rope_parameters": LLAMA3 | {"rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 32},
    },
    "smollm2": {"tie_word_embeddings": True, "rope_theta": 1e5},
    "llama, biased": {"attention_bias": True},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama, yarn, amplitude as given": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "attention_factor": 0.7,
            "original_max_position_embeddings": 128,
            "rope_theta": 5e5,
        },
    },
    "qwen2": {"kind": Qwen2Config, "rope_theta": 1e6},
    "qwen2, tied": {"kind": Qwen2Config, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16},
    "qwen2.5, yarn": {
        "kind": Qwen2Config,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    },
    "qwen3": {"kind": Qwen3Config, "head_dim": 16, "rope_theta": 1e6},
    "qwen3, tied, biased": {"kind": Qwen3Config, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3, yarn, every parameter": {
        "kind": Qwen3Config,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
}
PROMPT = tiny.prompt(7, 200)
HALF_KV = 0.1
"""What a float16 KV memory may cost with these large weights; with usual ones it is 1e-3 (tests/engine/kernel/test_logits.py)."""


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def spec(run: int) -> RunSpec:
    return RunSpec(
        run, tuple(PROMPT[: 40 + run]), (Choice(index=0),), Sampling(seed=0, max_tokens=24, temperature=0.0, ignore_eos=True)
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """In float32 and in shards, as large models come."""
    return tiny.make(tmp_path_factory.mktemp("family"), shard="60KB", **FAMILIES[request.param])


def test_logits_in_pure_torch(family: tiny.Tiny) -> None:
    bench, expected = Bench(family), family.logits(PROMPT)
    sequence = bench.sequence(PROMPT)
    for upto in (17, 90, 91, len(PROMPT)):
        close(bench.prefill(sequence, upto), expected[upto - 1], 1e-4)


def test_logits_in_the_kernel(family: tiny.Tiny, library: Library) -> None:
    config, tensors = load_config(family.files.config), tensors_in(family.files.folder)
    with Machine(library, config, tensors, kv_dtype=DType.F32) as exact, Machine(library, config, tensors) as half:
        close(torch.from_numpy(exact.whole(PROMPT).copy()), family.logits(PROMPT), 1e-4)
        close(torch.from_numpy(half.whole(PROMPT).copy()), family.logits(PROMPT), HALF_KV)


@pytest.mark.parametrize(("kernels", "tolerance"), [(None, 0.0), (CACHE, HALF_KV)], ids=["torch", "kernel"])
async def test_greedy_ids(family: tiny.Tiny, kernels: Path | None, tolerance: float) -> None:
    """Each token is the one transformers holds for the likeliest after the same ones, or as good as that."""
    async with Running(tiny.engine(family.files, kernels=kernels)) as running:
        generated = await running.generate(*(spec(run) for run in range(3)))
    for run, tokens in enumerate(generated):
        prompt = list(spec(run).prompt)
        theirs = family.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = theirs[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (theirs.max(dim=1).values - chosen <= tolerance).all()
        assert len(tokens) == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama 3.1", "qwen2", "qwen3"])
def test_weights_stored_in_half_precision(tmp_path: Path, library: Library, name: str, dtype: torch.dtype) -> None:
    model = tiny.make(tmp_path, dtype=dtype, **FAMILIES[name])
    bench, expected = Bench(model), model.logits(PROMPT)
    close(bench.prefill(bench.sequence(PROMPT), len(PROMPT)), expected[-1], 1e-4)
    with Machine(library, load_config(model.files.config), tensors_in(tmp_path), kv_dtype=DType.F32) as exact:
        close(torch.from_numpy(exact.whole(PROMPT).copy()), expected, 1e-4)
