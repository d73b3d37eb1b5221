"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.torch_engine.config import LlamaConfig, load_config, parse_config
from services.models.errors import ModelError

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
EXPECTED = LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e5, 1e-5, True)


def test_a_config_as_transformers_4_writes_it() -> None:
    assert parse_config(PLAIN) == EXPECTED
    assert EXPECTED.group == 3


def test_a_config_as_transformers_5_writes_it() -> None:
    raw = {key: value for key, value in PLAIN.items() if not key.startswith("rope")}
    assert parse_config(raw | {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}) == EXPECTED


def test_what_is_absent_or_null_has_transformers_default() -> None:
    absent = {"num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim"}
    for raw in ({k: v for k, v in PLAIN.items() if k not in absent}, PLAIN | dict.fromkeys(absent)):
        config = parse_config(raw)
        assert (config.kv_heads, config.rope_theta, config.eps, config.tied, config.head_dim) == (9, 1e4, 1e-6, False, 64)


def test_a_head_dim_of_its_own() -> None:
    assert parse_config(PLAIN | {"head_dim": 128}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size"),
        ({"num_key_value_heads": 2}, "2 KV heads"),
        ({"num_key_value_heads": 0}, "0 KV heads"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | change))
    with pytest.raises(ModelError, match=named):
        load_config(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path / "config.json")
