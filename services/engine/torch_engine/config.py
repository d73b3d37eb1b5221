"""A Hugging Face `config.json` of the Llama family as the numbers the model needs.

The family: Llama 2 and 3 and all that call themselves so (SmolLM2), Qwen2 (biases on q, k and v) and Qwen3 (norms on the heads of
q and k). Invariant: what this engine would compute wrongly is refused by name, before any weight is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.torch_engine.rope import Rope, parse_rope
from services.models.errors import ModelError

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """`group` query heads share one KV head; `context` is max_position_embeddings.

    What has a bias: the projections to q, k and v, and the one back. `qk_norm`: each head of q and k is normed before RoPE.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope: Rope
    eps: float
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


ANOTHER_HEAD = "lm_head.weight is not the embedding, which tie_word_embeddings makes the head; set that to false to use it"
"""What transformers 4 passed over and 5 computes with; only the configuration can say which is meant."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What transformers takes for granted of a model class. `head_dim`, `kv_heads` None: follow from the number of heads."""

    always_biased: bool = False
    may_be_biased: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(may_be_biased=True),
    "Qwen2ForCausalLM": _Architecture(always_biased=True, kv_heads=32),
    "Qwen3ForCausalLM": _Architecture(may_be_biased=True, qk_norm=True, kv_heads=32, head_dim=128),
}


def load_config(path: Path) -> LlamaConfig:
    """The model's configuration. Raises `ModelError` that names what is missing or not supported."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    try:
        return parse_config(raw)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path}: {error}") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """`raw` as a configuration, with transformers' defaults. Raises `ModelError`, TypeError, ValueError, AttributeError."""
    architecture = _architecture(raw)
    if missing := [key for key in _NEEDED if raw.get(key) is None]:
        raise ModelError(f"{', '.join(missing)} missing")
    _refuse_unsupported(raw)
    heads = int(raw["num_attention_heads"])
    kv_heads = int(_or(raw.get("num_key_value_heads"), architecture.kv_heads or heads))
    head_dim = int(_or(raw.get("head_dim"), architecture.head_dim or int(raw["hidden_size"]) // heads))
    if kv_heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise ModelError(f"{heads} heads, {kv_heads} KV heads and head_dim {head_dim} do not fit together")
    asked_bias = architecture.may_be_biased and bool(raw.get("attention_bias"))
    return LlamaConfig(
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=int(raw["max_position_embeddings"]),
        rope=parse_rope(raw),
        eps=float(_or(raw.get("rms_norm_eps"), 1e-6)),
        tied=bool(_or(raw.get("tie_word_embeddings"), False)),
        qkv_bias=architecture.always_biased or asked_bias,
        output_bias=asked_bias,
        qk_norm=architecture.qk_norm,
    )


def _architecture(raw: Mapping[str, Any]) -> _Architecture:
    name = (raw.get("architectures") or ["none named"])[0]
    if name not in _ARCHITECTURES:
        raise ModelError(f"architecture {name} is not supported; this engine computes {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[name]


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    refused = {
        f"hidden_act {raw.get('hidden_act')!r}": _or(raw.get("hidden_act"), "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "quantization_config": bool(raw.get("quantization_config")),
        f"sliding window attention (window {raw.get('sliding_window')})": _slides(raw),
    }
    if wrong := [name for name, is_wrong in refused.items() if is_wrong]:
        raise ModelError(f"{', '.join(wrong)} is not supported by this engine")


def _slides(raw: Mapping[str, Any]) -> bool:
    """Whether a layer sees less than the whole context: many a configuration names a window that no layer uses."""
    if (kinds := raw.get("layer_types")) is not None:
        return any(kind != "full_attention" for kind in kinds)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return window is not None and int(_or(raw.get("max_window_layers"), 28)) < int(raw["num_hidden_layers"])


def _or(value: Any, default: Any) -> Any:
    """JSON null means absent."""
    return default if value is None else value
