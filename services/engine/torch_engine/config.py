"""A Hugging Face `config.json` of the Llama family as the numbers the model needs.

Invariant: what this engine would compute wrongly is refused by name, before any weight is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.models.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM",)
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
    """`group` query heads share one KV head; `context` is max_position_embeddings."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    eps: float
    tied: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


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
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path}: {error}") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """`raw` as a configuration, with transformers' defaults. Raises `ModelError`, TypeError, ValueError."""
    _refuse_unsupported(raw)
    if missing := [key for key in _NEEDED if raw.get(key) is None]:
        raise ModelError(f"{', '.join(missing)} missing")
    heads = int(raw["num_attention_heads"])
    kv_heads = int(_or(raw.get("num_key_value_heads"), heads))
    head_dim = int(_or(raw.get("head_dim"), int(raw["hidden_size"]) // heads))
    if kv_heads < 1 or heads % kv_heads or head_dim % 2:
        raise ModelError(f"{heads} heads, {kv_heads} KV heads and head_dim {head_dim} do not fit together")
    return LlamaConfig(
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=int(raw["max_position_embeddings"]),
        rope_theta=float(_or(_rope(raw).get("rope_theta"), _or(raw.get("rope_theta"), 10_000.0))),
        eps=float(_or(raw.get("rms_norm_eps"), 1e-6)),
        tied=bool(_or(raw.get("tie_word_embeddings"), False)),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures") or ["none named"]
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]} is not supported; this engine computes {', '.join(ARCHITECTURES)}")
    kind = _or(_rope(raw).get("rope_type"), _or(_rope(raw).get("type"), "default"))
    refused = {
        f"rope scaling {kind!r}": kind != "default",
        f"hidden_act {raw.get('hidden_act')!r}": _or(raw.get("hidden_act"), "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "quantization_config": bool(raw.get("quantization_config")),
        "partial_rotary_factor": _or(_rope(raw).get("partial_rotary_factor"), _or(raw.get("partial_rotary_factor"), 1.0)) != 1.0,
    }
    if wrong := [name for name, is_wrong in refused.items() if is_wrong]:
        raise ModelError(f"{', '.join(wrong)} is not supported by this engine")


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_scaling`."""
    return _or(raw.get("rope_parameters"), _or(raw.get("rope_scaling"), {}))  # type: ignore[no-any-return]


def _or(value: Any, default: Any) -> Any:
    """JSON null means absent."""
    return default if value is None else value
