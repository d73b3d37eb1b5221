"""GGUF Llama → a folder in Hugging Face layout that `transformers` loads too.

Owns the mapping of names, shapes and numbers; tokenizer files are made in `convert_tokenizer`. Invariant: what cannot be
mapped exactly (another architecture, rope scaling, tensors we do not know) is refused, never dropped.

Linears and embeddings are written as float16, norms as float32. llama.cpp interleaves the rotary halves of attn_q and attn_k
rows; they are put back as Hugging Face's half-split rotation expects them.
Sources: llama.cpp convert_hf_to_gguf.py (LlamaModel.permute), gguf-py tensor_mapping.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from services.models.convert_tokenizer import tokenizer_config, write_tokenizer
from services.models.errors import ModelError
from services.models.gguf import Array, GGUFFile
from services.models.progress import Progress

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(source: Path, folder: Path, progress: Progress, generation: Mapping[str, float] | None = None) -> None:
    """Writes the model in the GGUF file `source` into the existing, empty `folder`; `generation` goes into its config.

    Raises `ModelError` for a file that is damaged or not a plain Llama, OSError when the disk refuses.
    """
    with GGUFFile(source) as gguf:
        config = llama_config(gguf)
        _check_tensors(gguf, config)
        write_tokenizer(gguf.metadata, folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf.metadata, config["max_position_embeddings"]))
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {**_token_ids(gguf.metadata), **_sampling(generation)})
        with progress.bar("Converting", sum(info.nbytes for info in gguf.tensors.values())) as advance:
            weights = {}
            for name, info in gguf.tensors.items():
                weights[huggingface_name(name)] = _weight(gguf, name, config)
                advance(info.nbytes)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def llama_config(gguf: GGUFFile) -> dict[str, Any]:
    """The `config.json` of a `LlamaForCausalLM`. Raises `ModelError` for any other architecture."""
    data = gguf.metadata
    if data.get("general.architecture") != "llama":
        raise ModelError(f"architecture {data.get('general.architecture')!r} is not supported; only llama is")
    if any(key.startswith("llama.rope.scaling.") for key in data):
        raise ModelError("GGUF files with rope scaling are not supported; use the model in Hugging Face layout")
    try:
        heads = data["llama.attention.head_count"]
        hidden = data["llama.embedding_length"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(data["tokenizer.ggml.tokens"]),
            "hidden_size": hidden,
            "intermediate_size": data["llama.feed_forward_length"],
            "num_hidden_layers": data["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": data.get("llama.attention.head_count_kv", heads),
            "head_dim": data.get("llama.rope.dimension_count", hidden // heads),
            "max_position_embeddings": data["llama.context_length"],
            "rms_norm_eps": _decimal(data["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _decimal(data.get("llama.rope.freq_base", 10_000.0)),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "torch_dtype": "float16",
            **_token_ids(data),
        }
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"the GGUF file lacks metadata that a llama needs: {error}") from None


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises `ModelError` for a tensor we do not know."""
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or part not in _LAYER:
        raise ModelError(f"the GGUF file holds tensor {name!r}, which a plain llama has not")
    return f"model.layers.{layer}.{_LAYER[part]}"


def unpermute(rows: Array, heads: int) -> Array:
    """Undoes llama.cpp's interleaving of rotary halves: [heads * dim, in] → the same shape, rows half-split per head."""
    out, inner = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, inner).swapaxes(1, 2).reshape(out, inner)


def _weight(gguf: GGUFFile, name: str, config: dict[str, Any]) -> NDArray[Any]:
    values = gguf.tensor(name)
    if name.endswith("_norm.weight"):
        return values
    if name.endswith("attn_q.weight"):
        values = unpermute(values, config["num_attention_heads"])
    elif name.endswith("attn_k.weight"):
        values = unpermute(values, config["num_key_value_heads"])
    return np.ascontiguousarray(values, np.float16)


def _check_tensors(gguf: GGUFFile, config: dict[str, Any]) -> None:
    """Exactly the tensors of a llama with so many layers, the embedding as large as the vocabulary."""
    wanted = {f"blk.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in _LAYER}
    wanted |= {"token_embd.weight", "output_norm.weight"}
    missing = wanted - gguf.tensors.keys()
    unknown = gguf.tensors.keys() - wanted - {"output.weight"}
    if missing or unknown:
        raise ModelError(f"the GGUF file is not a plain llama: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
    if gguf.tensors["token_embd.weight"].shape != (config["vocab_size"], config["hidden_size"]):
        raise ModelError("the GGUF file's embedding does not fit its vocabulary")


def _sampling(generation: Mapping[str, float] | None) -> dict[str, Any]:
    return {"do_sample": True, **generation} if generation else {}


def _token_ids(data: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: data.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: GGUF's 9.999999747378752e-06 is the 1e-05 of the original config."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
