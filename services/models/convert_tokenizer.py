"""The tokenizer inside a GGUF file → `tokenizer.json` and `tokenizer_config.json`.

Only byte-level BPE with the `smollm` pre-tokenizer: others split text differently, and a near miss would go unnoticed.
Source: llama.cpp llama-vocab.cpp (LLAMA_VOCAB_PRE_TYPE_SMOLLM); the original SmolLM2 tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.models.errors import ModelError

_CONTROL = 3
"""GGUF's token type of special tokens (llama.h, LLAMA_TOKEN_TYPE_CONTROL)."""


def write_tokenizer(data: dict[str, Any], path: Path) -> None:
    """Writes `tokenizer.json` from GGUF metadata. Raises `ModelError` for a tokenizer of another kind."""
    kind = (data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"GGUF tokenizer {kind} is not supported; use the model in Hugging Face layout")
    try:
        tokens: list[str] = data["tokenizer.ggml.tokens"]
        types: list[int] = data["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in data["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    except Exception as error:  # the library raises bare Exceptions for merges outside the vocabulary
        raise ModelError(f"the GGUF file's tokenizer is damaged: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))


def tokenizer_config(data: dict[str, Any], context_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: special tokens by role and the chat template."""
    tokens = data["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(data.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = data.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    if template := data.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
