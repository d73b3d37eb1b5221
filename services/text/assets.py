"""What a Hugging Face model folder says about its text: tokenizer, chat template, special tokens, end of sequence.

Owns the reading of these files and their many spellings; the rest of `text` sees one frozen value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TextError(Exception):
    """A model's tokenizer or chat template cannot be used. One line for the operator; raised at start-up only."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the model's makers would sample: what counts where a request says nothing. OpenAI's own defaults are 1 and 1."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class TextAssets:
    """`tokenizer`: the content of tokenizer.json. `special_tokens`: `bos_token`, `eos_token`, … by role, as a template
    may name them. `eos_ids`: every id that ends a sequence. `chat_template` is None for models that cannot chat.
    `generation` is what generation_config.json says of sampling."""

    tokenizer: str
    chat_template: str | None
    special_tokens: Mapping[str, str]
    eos_ids: frozenset[int]
    generation: GenerationDefaults = GenerationDefaults()


def read_assets(folder: Path) -> TextAssets:
    """The text assets of the model in `folder`. Raises `TextError` for files that are missing or not what they should be."""
    try:
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read {folder / 'tokenizer.json'}: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    special = {role: text for role, value in config.items() if role.endswith("_token") and (text := _token(value))}
    generation = _read_json(folder / "generation_config.json")
    eos = _ids(generation) or _ids(_read_json(folder / "config.json"))
    if "eos_token" in special:  # chat models name the end of a turn here, and the end of a document there
        eos |= _id_of(tokenizer, special["eos_token"])
    return TextAssets(tokenizer, _chat_template(folder, config), special, frozenset(eos), _defaults(generation))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TextError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise TextError(f"{path} is not a JSON object")
    return content


def _defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    """A value that no request could have is not taken."""
    temperature, top_p = config.get("temperature"), config.get("top_p")
    return GenerationDefaults(
        float(temperature) if isinstance(temperature, int | float) and 0 <= temperature <= 2 else 1.0,
        float(top_p) if isinstance(top_p, int | float) and 0 < top_p <= 1 else 1.0,
    )


def _token(value: object) -> str | None:
    """A special token is written as its text, or as an object with its text in `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(config: Mapping[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    return {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}


def _id_of(tokenizer: str, token: str) -> set[int]:
    try:
        added = json.loads(tokenizer).get("added_tokens", [])
        return {item["id"] for item in added if item["content"] == token}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise TextError(f"tokenizer.json is damaged: {error}") from None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The file of its own wins; among named templates it is the one called `default`."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
