"""The kernel, compiled for this machine and for others, once a machine."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.compiler import NATIVE, build, find_compiler
from services.engine.torch_engine.kernel.library import Library
from tests.engine.kernel.rig import Machine, tensors_in
from tests.engine.torch_engine import tiny

CACHE = Path(tempfile.gettempdir()) / "headrace-test-kernels"
PLAIN = ("-march=x86-64",) if platform.machine() == "x86_64" else ()
AVX2 = ("-march=x86-64-v3",)


def compiled(target: tuple[str, ...]) -> Library:
    return Library(build(CACHE, find_compiler(), target=target))


@pytest.fixture(scope="session")
def library() -> Library:
    return compiled(NATIVE)


def checkpoint(folder: Path, dtype: torch.dtype, **changes: Any) -> tiny.Tiny:
    """Stored as `dtype`."""
    return tiny.make(folder, dtype=dtype, **changes)


@pytest.fixture(scope="session")
def half_gqa(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """float16 weights; three query heads a KV head, nothing a multiple of the kernel's strips."""
    return checkpoint(tmp_path_factory.mktemp("half-gqa"), torch.float16)


@pytest.fixture(scope="session")
def half_wide(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """bfloat16 weights; products longer than one packed piece, whole strips, a head of its own for each KV head."""
    return checkpoint(
        tmp_path_factory.mktemp("half-wide"),
        torch.bfloat16,
        hidden_size=128,
        intermediate_size=1088,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


def machine(library: Library, model: tiny.Tiny, **options: int) -> Machine:
    return Machine(library, load_config(model.files.config), tensors_in(model.files.folder), **options)  # type: ignore[arg-type]
