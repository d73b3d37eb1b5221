"""Settings of the scripted engine that cannot be, found when it is built: each error names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.clock import SystemClock
from services.engine.build import build_engine
from services.models.store import ModelStore
from services.settings.errors import SettingsError
from services.settings.settings import Settings
from tests.text.tiny import write_tiny_model_folder


@pytest.mark.parametrize(
    ("worker", "scripted", "key"),
    [
        ({"kv_blocks": 2**31 - 1}, {"block_bytes": 2**30}, "worker.kv_blocks"),
        ({}, {"block_tokens": 1024, "block_bytes": 4096}, "scripted.block_bytes"),
        ({}, {"scripts": "/dev/null"}, "scripted.scripts: /dev/null"),
        ({}, {"scripts": "missing.json"}, "scripted.scripts: missing.json"),
    ],
)
def test_the_key_is_named(tmp_path: Path, worker: dict[str, Any], scripted: dict[str, Any], key: str) -> None:
    files = ModelStore(tmp_path).open(str(write_tiny_model_folder(tmp_path / "tiny")), weights=False)
    settings = Settings.model_validate({"worker": {"engine": "scripted", **worker}, "scripted": scripted})
    with pytest.raises(SettingsError, match=key):
        build_engine(files, settings, SystemClock())
