"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.torch_engine.config import LlamaConfig, load_config, parse_config
from services.engine.torch_engine.rope import Llama3, Rope, Yarn
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
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
EXPECTED = LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, Rope(1e5), 1e-5, True)


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
        assert (config.kv_heads, config.rope.theta, config.eps, config.tied, config.head_dim) == (9, 1e4, 1e-6, False, 64)


def test_a_head_dim_of_its_own() -> None:
    assert parse_config(PLAIN | {"head_dim": 128}).head_dim == 128


def test_what_an_architecture_takes_for_granted() -> None:
    qwen2, qwen3 = parse_config(PLAIN | QWEN2), parse_config(PLAIN | QWEN3)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 64)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    biased = parse_config(PLAIN | {"attention_bias": True})
    assert (biased.qkv_bias, biased.output_bias) == (True, True)


def test_scaling_in_both_spellings() -> None:
    old = parse_config(PLAIN | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}})
    new = parse_config(PLAIN | {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}, "original_max_position_embeddings": 512})
    assert old.rope == new.rope == Rope(1e5, Llama3(8.0, 1.0, 4.0, 512))
    yarn = parse_config(PLAIN | {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}})
    assert yarn.rope == Rope(1e5, Yarn(4.0, 32.0, 1.0, 8192, 1.5))


@pytest.mark.parametrize(
    "unused",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 30},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 30},
    ],
)
def test_a_sliding_window_that_no_layer_uses(unused: dict[str, Any]) -> None:
    assert parse_config(PLAIN | QWEN2 | unused) == parse_config(PLAIN | QWEN2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' with low_freq_factor None"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "not below high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, r"'linear' with factor 0\.0"),
        ({"rope_scaling": {"type": "yarn", "factor": "wide"}}, "config.json"),
        ({"rope_scaling": "yarn"}, "config.json"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, r"by layer type \(full_attention\)"),
        ({"rope_theta": 1.0}, r"rope_theta 1\.0"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 12}, r"sliding window.* 64"),
        (QWEN2 | {"layer_types": ["full_attention"] * 29 + ["sliding_attention"]}, "sliding window"),
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
