"""The real default model, fetched once a machine; tests that use it are marked `model`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.models.catalog import DEFAULT_MODEL
from services.models.progress import Terminal
from services.models.store import ModelFiles, ModelStore


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """Its files under `HEADRACE_HOME`; fails, never skips, when it cannot be had."""
    home = Path(os.environ.get("HEADRACE_HOME") or Path.home() / ".cache" / "headrace")
    return ModelStore(home).ensure(DEFAULT_MODEL, Terminal())
