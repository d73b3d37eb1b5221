"""Weights from safetensors files, as the model multiplies them.

The files are mapped read-only and copied tensor by tensor: converted to the compute dtype, q|k|v and gate|up fused to one matrix
each. Invariant: what comes out has exactly the shapes the configuration asks for; a file that does not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.torch_engine.config import LlamaConfig
from services.models.errors import ModelError

_FLOATS = ("F32", "F16", "BF16")
_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, matrices [out, in]. `qkv`: rows of q, then k, then v; `gate_up`: gate, then up."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """`head` is `embed` itself when they are tied."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def load_weights(files: Sequence[Path], config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Weights:
    """All weights as `dtype`. Raises `ModelError` for a missing, an unknown or a mis-shaped tensor."""
    with ExitStack() as stack:
        source = _Source(stack, files, dtype)
        source.refuse_misfits(_shapes(config), config.tied)
        embed = source.take(_EMBED)
        return Weights(
            embed=embed,
            layers=tuple(_layer(source, f"model.layers.{number}") for number in range(config.layers)),
            norm=source.take(_NORM),
            head=embed if config.tied else source.take(_HEAD),
        )


class _Source:
    """The tensors of several files under one set of names."""

    def __init__(self, stack: ExitStack, files: Sequence[Path], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(_open(file))
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def take(self, *names: str) -> Tensor:
        """The named tensors, one below the other. Always a copy: a view would fault pages of the file in during a step."""
        parts = [self._file_of[name].get_tensor(name) for name in names]
        return parts[0].to(self._dtype, copy=True) if len(parts) == 1 else torch.cat([part.to(self._dtype) for part in parts])

    def refuse_misfits(self, expected: dict[str, tuple[int, ...]], tied: bool) -> None:
        if missing := [name for name in expected if name not in self._file_of]:
            raise ModelError(f"the weights lack {_listed(missing)}")
        if unknown := [name for name in self._file_of if name not in expected and not _ignored(name, tied)]:
            raise ModelError(f"the weights hold what this model does not have: {_listed(unknown)}")
        for name, shape in expected.items():
            found = self._file_of[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ModelError(f"{name} has shape {found.get_shape()} where the configuration asks for {list(shape)}")
            if found.get_dtype() not in _FLOATS:
                raise ModelError(f"{name} is stored as {found.get_dtype()}; this engine reads {', '.join(_FLOATS)}")


def _layer(source: _Source, prefix: str) -> Layer:
    def take(*names: str) -> Tensor:
        return source.take(*(f"{prefix}.{name}.weight" for name in names))

    return Layer(
        attention_norm=take("input_layernorm"),
        qkv=take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=take("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=take("mlp.gate_proj", "mlp.up_proj"),
        down=take("mlp.down_proj"),
    )


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, kv, q = config.hidden, config.kv_heads * config.head_dim, config.heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (config.intermediate, hidden),
        "mlp.up_proj": (config.intermediate, hidden),
        "mlp.down_proj": (hidden, config.intermediate),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in layer.items()}
    head = {} if config.tied else {_HEAD: (config.vocab, hidden)}
    return {_EMBED: (config.vocab, hidden), _NORM: (hidden,)} | shapes | head


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a whole safetensors file: {error}; fetch the model again") from None


def _ignored(name: str, tied: bool) -> bool:
    """A copy of what is computed anyway: the head of a tied model, the rotary frequencies of old checkpoints."""
    return (tied and name == _HEAD) or name.endswith("rotary_emb.inv_freq")


def _listed(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
