"""LoRA adapters: folders that will do, what goes to the engine, and what keeps their KV blocks apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.engine.trtllm_engine.adapters import lora_config, read_adapters
from services.settings.errors import SettingsError
from services.settings.trtllm import TrtllmSettings
from tests.engine.trtllm_engine.configurations import LoraConfig


def write_adapter(folder: Path, modules: Sequence[str] = ("q_proj", "v_proj"), rank: object = 8, weights: bytes = b"w") -> Path:
    """In PEFT's layout. The weights are never read here."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": list(modules)}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def settings(**folders: Path) -> TrtllmSettings:
    return TrtllmSettings(adapters=folders, max_adapter_rank=16)


def test_one_folder_that_has_the_modules_of_all_is_told_to_the_engine(tmp_path: Path) -> None:
    narrow, wide = write_adapter(tmp_path / "a", ["q_proj"]), write_adapter(tmp_path / "b", ["q_proj", "up_proj"])
    made = LoraConfig(**lora_config(read_adapters(settings(narrow=narrow, wide=wide)), 16))
    assert (made.lora_dir, made.max_lora_rank, made.max_loras, made.max_cpu_loras) == ([str(wide)], 16, 2, 2)
    other = write_adapter(tmp_path / "c", ["k_proj"])
    with pytest.raises(SettingsError, match=r"trtllm.adapters.other: changes k_proj, which wide does not"):
        lora_config(read_adapters(settings(other=other, wide=wide)), 16)


def test_what_an_adapter_computes_is_in_its_digest(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b"), write_adapter(tmp_path / "c", weights=b"other")]
    digests = [read_adapters(settings(sql=folder))[0].digest for folder in folders]
    assert digests[0] == digests[1] != digests[2]


def test_a_folder_that_will_not_do_is_named(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good")
    pickled = write_adapter(tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    for given, said in (
        (settings(a=tmp_path / "nowhere"), "trtllm.adapters.a: there is no folder"),
        (settings(a=pickled), "trtllm.adapters.a: .* has no adapter_model.safetensors"),
        (settings(a=write_adapter(tmp_path / "big", rank=64)), "trtllm.adapters.a: its rank is 64"),
        (settings(a=write_adapter(tmp_path / "odd", rank="8")), "trtllm.adapters.a: .* no rank"),
        (settings(**{"a:b": good}), "trtllm.adapters.a:b: a name has"),
    ):
        with pytest.raises(SettingsError, match=said):
            read_adapters(given)
    (good / "adapter_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"trtllm.adapters.a: cannot read"):
        read_adapters(settings(a=good))
