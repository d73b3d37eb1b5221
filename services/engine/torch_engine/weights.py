"""Weights from safetensors files, as the model multiplies them.

The files are mapped read-only and copied tensor by tensor: converted to the compute dtype, q|k|v and gate|up fused to one matrix
each. Invariant: what comes out has exactly the shapes the configuration asks for; a file that does not fit is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.torch_engine.config import ANOTHER_HEAD, LlamaConfig
from services.engine.torch_engine.device import CPU, Place
from services.models.errors import ModelError

_FLOATS = ("F32", "F16", "BF16")
_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, matrices [out, in]. `qkv`: rows of q, then k, then v; `gate_up`: gate, then up.

    None: the model has no such bias, or no norms on the heads of q and k.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
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


def load_weights(files: Sequence[Path], config: LlamaConfig, place: Place = CPU) -> Weights:
    """All weights at `place`, in its precision. Raises `ModelError` for a missing, an unknown or a mis-shaped tensor."""
    with ExitStack() as stack:
        source = _Source(stack, files, place)
        source.refuse_misfits(_shapes(config), config.tied)
        embed = source.take(_EMBED)
        if config.tied:
            source.refuse_another_head(embed)
        return Weights(
            embed=embed,
            layers=tuple(_layer(source, config, f"model.layers.{number}") for number in range(config.layers)),
            norm=source.take(_NORM),
            head=embed if config.tied else source.take(_HEAD),
        )


def weight_bytes(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> int:
    """What `load_weights` takes of memory."""
    return dtype.itemsize * sum(math.prod(shape) for shape in _shapes(config).values())


class _Source:
    """The tensors of several files under one set of names."""

    def __init__(self, stack: ExitStack, files: Sequence[Path], place: Place) -> None:
        self._place = place
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(_open(file))
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def take(self, *names: str) -> Tensor:
        """The named tensors, one below the other. Always a copy: a view would fault pages of the file in during a step."""
        parts = [self._file_of[name].get_tensor(name) for name in names]
        device, dtype = self._place.device, self._place.dtype
        return torch.cat([part.to(dtype) for part in parts]).to(device) if parts[1:] else parts[0].to(device, dtype, copy=True)

    def refuse_another_head(self, embed: Tensor) -> None:
        """A tied model may store its head once more, but not one of its own."""
        if _HEAD in self._file_of and not torch.equal(self.take(_HEAD), embed):
            raise ModelError(ANOTHER_HEAD)

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


def _layer(source: _Source, config: LlamaConfig, prefix: str) -> Layer:
    def take(*names: str) -> Tensor:
        return source.take(*(f"{prefix}.{name}" for name in names))

    return Layer(
        attention_norm=take("input_layernorm.weight"),
        qkv=take(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
        qkv_bias=take(*(f"self_attn.{part}_proj.bias" for part in "qkv")) if config.qkv_bias else None,
        query_norm=take("self_attn.q_norm.weight") if config.qk_norm else None,
        key_norm=take("self_attn.k_norm.weight") if config.qk_norm else None,
        output=take("self_attn.o_proj.weight"),
        output_bias=take("self_attn.o_proj.bias") if config.output_bias else None,
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=take("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=take("mlp.down_proj.weight"),
    )


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    layer = _layer_shapes(config)
    shapes = {f"model.layers.{number}.{name}": shape for number in range(config.layers) for name, shape in layer.items()}
    head = {} if config.tied else {_HEAD: (config.vocab, config.hidden)}
    return {_EMBED: (config.vocab, config.hidden), _NORM: (config.hidden,)} | shapes | head


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden, config.head_dim
    kv, q = config.kv_heads * dim, config.heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate, hidden),
        "mlp.up_proj.weight": (config.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate),
    }
    if config.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        shapes |= {"self_attn.o_proj.bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


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
