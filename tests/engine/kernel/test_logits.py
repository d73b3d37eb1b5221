"""The kernel's logits against transformers on the same weights: shapes, storage types, both KV types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.torch_engine.config import load_config
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
