"""`trtllm.speculative` as fields of one of TensorRT-LLM's speculative configurations.

Pure. Its `LLM` takes objects of these classes and no tables. Invariants: each key is a field of its class, and what it cannot do
without is there; sampling goes on to be heeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.trtllm_engine import contract
from services.settings.errors import SettingsError

_NEEDED = {
    "Eagle": ("max_draft_len", "speculative_model"),
    "NGram": ("max_draft_len",),
    "DraftTarget": ("max_draft_len", "speculative_model"),
}
_ONE_MODEL = {"Eagle": "eagle3_one_model", "MTP": "mtp_eagle_one_model"}
"""What says, true unless it is set, that drafts are made within the model: that path draws greedily unless it is told not to."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """`kind`: its decoding type."""

    kind: str
    fields: dict[str, Any]


def speculation(table: dict[str, Any]) -> Speculation:
    """Raises `SettingsError` that names the key."""
    fields = dict(table)
    kind = fields.pop("decoding_type", None)
    if kind not in contract.SPECULATIVE:
        raise _wrong("decoding_type", f"{kind!r} is none of {', '.join(contract.SPECULATIVE)}")
    known = contract.names(contract.SPECULATIVE_BASE) | contract.names(f"llmapi.{contract.SPECULATIVE[kind]}")
    for key in fields:
        if key not in known:
            raise _wrong(key, f"{kind} has no such field in TensorRT-LLM {contract.VERSION}")
    for key in _NEEDED.get(kind, ()):
        if not fields.get(key):
            raise _wrong(key, f"{kind} needs it")
    model = fields.get("speculative_model")
    if model is not None and not Path(model).is_dir():  # a name would be fetched from a hub, by nobody that we know of
        raise _wrong("speculative_model", f"there is no folder {model}")
    if kind in _ONE_MODEL and fields.get(_ONE_MODEL[kind], True) and not fields.setdefault("allow_advanced_sampling", True):
        raise _wrong("allow_advanced_sampling", "without it every request would be drawn greedily")
    return Speculation(kind, fields)


def _wrong(key: str, text: str) -> SettingsError:
    return SettingsError(f"trtllm.speculative.{key}: {text}")
