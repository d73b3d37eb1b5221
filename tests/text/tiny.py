"""A tokenizer small enough to reason about, made in code: all 256 bytes, a few merges, four special tokens.

Ids: 0..3 special (`<|end|>`, `<|user|>`, `<|assistant|>`, `<|system|>`), 4..259 the bytes in the order of their values, then
the merges. `byte_id(b)` is the id of byte b.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from services.clock import ManualClock
from services.text.assets import TextAssets
from services.text.prompt import PromptEncoder
from services.text.template import ChatTemplate
from services.text.tokenizer import Tokenizer
from services.text.vocabulary import byte_alphabet

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
END = 0
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"))
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4 + 256 + len(MERGES),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": END,
}


def byte_id(byte: int) -> int:
    return len(SPECIAL) + byte


def byte_ids(text: str | bytes) -> list[int]:
    """One id a byte: how a script splits characters over tokens."""
    return [byte_id(byte) for byte in (text.encode() if isinstance(text, str) else text)]


@lru_cache(maxsize=1)
def tiny_tokenizer_json() -> str:
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    pieces = [*SPECIAL, *(alphabet[byte] for byte in range(256)), *(left + right for left, right in MERGES)]
    library = Library(models.BPE({piece: index for index, piece in enumerate(pieces)}, list(MERGES)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return library.to_str()


def tiny_assets(template: str | None = TEMPLATE) -> TextAssets:
    return TextAssets(tiny_tokenizer_json(), template, {"eos_token": SPECIAL[END]}, frozenset({END}))


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_assets())


def tiny_template(template: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(tiny_assets(template), ManualClock())


def tiny_prompts(template: str = TEMPLATE) -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(), tiny_template(template))


def write_tiny_model_folder(folder: Path) -> Path:
    """A model folder without weights: `ModelStore.open(…, weights=False)` takes it, for engines that play a script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END],
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder
