"""What every engine reads of a model's folder beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.models.errors import ModelError


def read_eos_ids(folder: Path) -> frozenset[int]:
    """Every id that one of the model's files calls its end of sequence. Raises `ModelError` when none does."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None:
        added = read_json(folder / "tokenizer.json").get("added_tokens", [])
        found.update(item["id"] for item in added if item["content"] == text)
    if not found:
        raise ModelError(f"no file in {folder} names an end-of-sequence token: its answers would never end")
    return frozenset(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is not there. Raises `ModelError`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
