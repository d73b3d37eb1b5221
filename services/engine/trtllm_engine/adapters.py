"""LoRA adapters for a TensorRT-LLM engine: which folders will do, and what of them names its KV blocks.

Reads folders in PEFT's layout; knows no request. Invariants: nothing executable is read, so weights are safetensors; what an
adapter computes is in its digest, so that engines with other weights under one name are never paired.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.model_files import read_json
from services.models.errors import ModelError
from services.settings.errors import SettingsError
from services.settings.trtllm import TrtllmSettings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """`modules`: of the model, by name, that it changes. `digest`: of configuration and weights, in hex."""

    name: str
    folder: Path
    modules: frozenset[str]
    digest: str


def read_adapters(settings: TrtllmSettings) -> tuple[Adapter, ...]:
    """By name. Raises `SettingsError` that names the adapter."""
    return tuple(_read(name, folder, settings.max_adapter_rank) for name, folder in sorted(settings.adapters.items()))


def lora_config(adapters: Sequence[Adapter], most_rank: int) -> dict[str, Any]:
    """Fields of its LoraConfig: of one folder the modules are read, so that must be one that has those of all.

    Raises `SettingsError`.
    """
    widest = max(adapters, key=lambda adapter: len(adapter.modules))
    for adapter in adapters:
        if more := sorted(adapter.modules - widest.modules):
            text = f"changes {', '.join(more)}, which {widest.name} does not; one adapter must change the modules of all"
            raise _wrong(adapter.name, text)
    count = len(adapters)
    return {"lora_dir": [str(widest.folder)], "max_lora_rank": most_rank, "max_loras": count, "max_cpu_loras": count}


def _read(name: str, folder: Path, most_rank: int) -> Adapter:
    if not _NAME.fullmatch(name):
        raise _wrong(name, "a name has letters, digits, dots, dashes and underscores only")
    if not folder.is_dir():
        raise _wrong(name, f"there is no folder {folder}")
    if not (folder / _WEIGHTS).is_file():
        raise _wrong(name, f"{folder} has no {_WEIGHTS}; other formats may hold code, and are not read")
    try:
        config = read_json(folder / _CONFIG)
    except ModelError as error:
        raise _wrong(name, str(error)) from None
    rank, modules = config.get("r"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(modules, list):
        raise _wrong(name, f"{folder / _CONFIG} says no rank (r) or no list of target_modules")
    if rank > most_rank:
        raise _wrong(name, f"its rank is {rank}; trtllm.max_adapter_rank is {most_rank}")
    return Adapter(name, folder, frozenset(map(str, modules)), _digest(folder))


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (_CONFIG, _WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _wrong(name: str, text: str) -> SettingsError:
    return SettingsError(f"trtllm.adapters.{name}: {text}")
