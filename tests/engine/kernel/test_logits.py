"""The kernel's logits against transformers on the same weights: shapes, storage types, both KV types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.engine.torch_engine.config import LlamaConfig, load_config
from services.engine.torch_engine.kernel.library import DType, Library
from services.engine.torch_engine.kernel.model import Floats
from tests.engine.kernel.conftest import checkpoint
from tests.engine.kernel.rig import Machine, tensors_in
from tests.engine.torch_engine import tiny

SHAPES: dict[str, dict[str, Any]] = {
    "head of 8": {},
    "head of 32": {"head_dim": 32},
    "head of 64": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1},
    "head of 80": {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 2},
    "head of 128, many share one": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "odd everywhere": {"hidden_size": 54, "head_dim": 10, "intermediate_size": 77, "vocab_size": 131, "rope_theta": 1e5},
    "tied": {"tie_word_embeddings": True},
    "longer than a piece": {"intermediate_size": 1043, "initializer_range": 0.1},
}


def close(ours: Floats, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(torch.from_numpy(ours.copy()), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_shapes_and_storage_types(library: Library, tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    model = checkpoint(tmp_path, dtype, **SHAPES[shape])
    ids = [token % 131 for token in tiny.prompt(3, 60)]
    config, tensors = load_config(model.files.config), tensors_in(tmp_path)
    with Machine(library, config, tensors, kv_dtype=DType.F32) as exact, Machine(library, config, tensors) as half:
        close(exact.whole(ids), model.logits(ids), 1e-4)
        close(half.whole(ids), model.logits(ids), 5e-2)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 200])
def test_lengths(library: Library, half_gqa: tiny.Tiny, length: int) -> None:
    ids = tiny.prompt(length, length)
    with Machine(library, load_config(half_gqa.files.config), tensors_in(half_gqa.files.folder), kv_dtype=DType.F32) as machine:
        close(machine.whole(ids), half_gqa.logits(ids), 1e-4)


def test_a_float16_kv_memory_costs_little_accuracy(library: Library, tmp_path: Path) -> None:
    """With weights of the usual size; those of other tests are large, to make differences seen."""
    model = checkpoint(tmp_path, torch.float16, initializer_range=0.05)
    ids = tiny.prompt(1, 100)
    with Machine(library, load_config(model.files.config), tensors_in(tmp_path)) as machine:
        close(machine.whole(ids), model.logits(ids), 1e-3)


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("kind", "settings"), [(Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)])
def test_attention_bias_and_norms_of_queries_and_keys(library: Library, tmp_path: Path, kind: Any, settings: Any) -> None:
    torch.manual_seed(3)
    made = kind(settings(**SMALL))
    for name, parameter in made.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # made as zeros and ones, which would hide a missing one
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    made.half().save_pretrained(tmp_path)
    reference = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = LlamaConfig(
        vocab=97,
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context=64,
        rope_theta=10_000.0,
        eps=1e-6,
        tied=False,
    )
    ids = [5, 9, 60, 2, 2, 41, 33, 96, 0, 17]
    with Machine(library, config, tensors_in(tmp_path), kv_dtype=DType.F32) as machine, torch.inference_mode():
        close(machine.whole(ids), reference(torch.tensor([ids])).logits[0], 1e-4)
