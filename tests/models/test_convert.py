"""A GGUF llama becomes a folder that `transformers` reads, number for number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from services.models.convert import convert, unpermute
from services.models.errors import ModelError
from services.models.progress import Silent
from tests.models.tiny_gguf import F32, HEADS, HIDDEN, KV_HEADS, Tensors, gguf_bytes, llama_metadata, llama_tensors


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to attn_q and attn_k: the two rotary halves of each head interleaved."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def converted(tmp_path: Path, metadata: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    source, folder = tmp_path / "x.gguf", tmp_path / "model"
    source.write_bytes(gguf_bytes(metadata or llama_metadata(), llama_tensors()[0] if tensors is None else tensors))
    folder.mkdir()
    convert(source, folder, Silent())
    return folder


def test_unpermute_undoes_llama_cpp() -> None:
    rows = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(unpermute(permute(rows, 4), 4), rows)
    assert not np.array_equal(permute(rows, 4), rows)


def test_weights_names_types_and_numbers(tmp_path: Path) -> None:
    weights = load_file(converted(tmp_path) / "model.safetensors")
    given = llama_tensors()[1]
    assert len(weights) == len(given)
    assert "lm_head.weight" not in weights
    layer = "model.layers.1."
    assert np.array_equal(weights["model.embed_tokens.weight"], given["token_embd.weight"])
    assert np.array_equal(weights[layer + "mlp.down_proj.weight"], given["blk.1.ffn_down.weight"])
    assert np.array_equal(permute(weights[layer + "self_attn.q_proj.weight"], HEADS), given["blk.1.attn_q.weight"])
    assert np.array_equal(permute(weights[layer + "self_attn.k_proj.weight"], KV_HEADS), given["blk.1.attn_k.weight"])
    for name, array in weights.items():
        assert array.dtype == (np.float32 if "norm" in name else np.float16), name


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted(tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.rms_norm_eps, model.config.tie_word_embeddings) == (1e-5, True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], tokenize=False) == "hé<|end|>"


def test_an_output_matrix_of_its_own_is_kept(tmp_path: Path) -> None:
    tensors, arrays = llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"]
    folder = converted(tmp_path, tensors=tensors)
    weights = load_file(folder / "model.safetensors")
    assert np.array_equal(weights["lm_head.weight"], arrays["token_embd.weight"])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode("he12<|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he12<|end|>"
    assert (len(ids), ids[-1]) == (4, 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "tokenizer is damaged"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "vocabulary"),
        ({"llama.block_count": 3}, "missing"),
        ({"llama.block_count": 1}, "unknown"),
    ],
)
def test_what_cannot_be_mapped_exactly_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        converted(tmp_path, llama_metadata(**changes))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    metadata = llama_metadata()
    del metadata["llama.context_length"]
    with pytest.raises(ModelError, match=r"llama\.context_length"):
        converted(tmp_path, metadata)


def test_a_tensor_we_do_not_know_is_refused(tmp_path: Path) -> None:
    tensors = {**llama_tensors()[0], "blk.0.attn_q.bias": (F32, (HIDDEN,), b"\0" * 4 * HIDDEN)}
    with pytest.raises(ModelError, match=r"attn_q\.bias"):
        converted(tmp_path, tensors=tensors)
