"""Weights from one file and from shards, in each stored precision; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.weights import Weights, load_weights
from services.models.errors import ModelError
from tests.engine.torch_engine import tiny

Tensors = dict[str, Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(model: tiny.Tiny) -> Weights:
    return load_weights(model.files.safetensors, load_config(model.files.config))


def test_the_fused_matrices_are_the_parts_in_order(gqa: tiny.Tiny) -> None:
    stored = gqa.reference.state_dict()
    layer = load(gqa).layers[1]
    prefix = "model.layers.1"
    qkv = [stored[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
    gate_up = [stored[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert torch.equal(layer.gate_up, torch.cat(gate_up))
    assert torch.equal(layer.down, stored[DOWN])


def test_a_tied_head_is_the_embedding_itself(tied: tiny.Tiny) -> None:
    weights = load(tied)
    assert weights.head is weights.embed


def test_shards_give_what_one_file_gives(gqa: tiny.Tiny, tmp_path: Path) -> None:
    sharded = tiny.make(tmp_path, shard="60KB")
    assert len(sharded.files.safetensors) > 2
    torch.testing.assert_close(load(sharded).layers[2].qkv, load(gqa).layers[2].qkv, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.make(tmp_path, dtype=dtype)
    weights = load(model)
    assert weights.embed.dtype is torch.float32
    assert torch.equal(weights.embed, model.reference.state_dict()["model.embed_tokens.weight"])


def test_the_files_are_not_needed_afterwards(gqa: tiny.Tiny, tmp_path: Path) -> None:
    """No weight is a view of the mapping: overwriting the file in place changes none."""
    model = tiny.make(tmp_path)
    weights = load(model)
    for file in model.files.safetensors:
        with file.open("r+b") as content:
            content.write(b"\xff" * file.stat().st_size)
    assert torch.equal(weights.norm, gqa.reference.state_dict()["model.norm.weight"])
    assert torch.equal(weights.layers[1].down, gqa.reference.state_dict()[DOWN])


def drop(tensors: Tensors) -> None:
    del tensors[DOWN]


def add(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(48)


def deepen(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.down_proj.weight"] = torch.zeros(48, 96)


def reshape(tensors: Tensors) -> None:
    tensors[DOWN] = tensors[DOWN].T.contiguous()


def quantise(tensors: Tensors) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, f"lack {DOWN}"),
        (add, r"q_proj\.bias"),
        (deepen, r"model\.layers\.3"),
        (reshape, r"shape \[96, 48\] where the configuration asks for \[48, 96\]"),
        (quantise, "stored as I8"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, damage: Callable[[Tensors], None], message: str) -> None:
    model = tiny.make(tmp_path)
    (file,) = model.files.safetensors
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=message):
        load(model)


def test_a_tied_model_may_store_its_head_once_more(tied: tiny.Tiny, tmp_path: Path) -> None:
    (file,) = tied.files.safetensors
    tensors = load_file(file)
    copy = tmp_path / "model.safetensors"
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, copy)
    assert load_weights([copy], load_config(tied.files.config)).embed.shape == (tiny.VOCAB, 48)


def test_a_tied_model_with_a_head_of_its_own_is_refused(tied: tiny.Tiny, tmp_path: Path) -> None:
    (file,) = tied.files.safetensors
    tensors = load_file(file)
    other = tmp_path / "model.safetensors"
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}, other)
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding"):
        load_weights([other], load_config(tied.files.config))


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_broken_file(gqa: tiny.Tiny, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_weights([file], load_config(gqa.files.config))


def test_a_truncated_file(gqa: tiny.Tiny, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(gqa.files.safetensors[0].read_bytes()[:-1000])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_weights([file], load_config(gqa.files.config))
