"""Model files and settings → an engine that says what it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.engine.model_files import read_eos_ids
from services.models.errors import ModelError
from tests.engine.torch_engine import tiny


def test_what_the_engine_says_of_itself(gqa: tiny.Tiny) -> None:
    info = tiny.engine(gqa.files, max_batch=7, step_tokens=96).info
    assert (info.name, info.model, info.weights) == ("torch", "tiny", "w1")
    assert (info.context_length, info.vocab_size, info.block_tokens) == (tiny.CONTEXT, tiny.VOCAB, 16)
    assert (info.max_batch, info.step_tokens, info.eos_ids) == (7, 96, frozenset({tiny.EOS}))
    assert info.capabilities.seed
    assert not info.capabilities.exact_resume


def test_kv_is_compatible_for_equal_weights_only(gqa: tiny.Tiny, tied: tiny.Tiny) -> None:
    first = tiny.engine(gqa.files).info.kv_compat
    assert first == tiny.engine(gqa.files, kv_blocks=80, threads=2).info.kv_compat
    assert first != tiny.engine(replace(gqa.files, weights="w2")).info.kv_compat


def test_a_small_pool_shortens_the_context(gqa: tiny.Tiny, tmp_path: Path) -> None:
    long = tiny.make(tmp_path, max_position_embeddings=4096)
    assert tiny.engine(long.files, kv_blocks=64).info.context_length == 1024
    assert tiny.engine(gqa.files, kv_blocks=64).info.context_length == tiny.CONTEXT


@pytest.mark.parametrize(
    ("contents", "ids"),
    [
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [2, 7]}}, {2, 7}),
        (
            {
                "config.json": {"eos_token_id": None},
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": {"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 9, "content": "<|im_end|>"}]},
            },
            {9},
        ),
        (
            {
                "config.json": {"eos_token_id": 0},
                "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
                "tokenizer.json": {"added_tokens": [{"id": 5, "content": "</s>"}]},
            },
            {0, 5},
        ),
    ],
)
def test_every_end_of_sequence_a_file_names(tmp_path: Path, contents: dict[str, Any], ids: set[int]) -> None:
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_eos_ids(tmp_path) == ids


def test_a_model_that_could_never_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="end-of-sequence"):
        read_eos_ids(tmp_path)


def test_an_end_of_sequence_that_no_row_of_logits_has(gqa: tiny.Tiny, tmp_path: Path) -> None:
    """It would be banned, before `min_tokens`, in a row that does not have it: a step that breaks, for all its runs."""
    folder = Path(shutil.copytree(gqa.files.folder, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny.EOS, tiny.VOCAB]}))
    assert tiny.engine(tiny.files_of(folder)).info.eos_ids == {tiny.EOS}
    for name in ("generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text()) | {"eos_token_id": tiny.VOCAB}
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"\[257\] is outside a vocabulary of 257"):
        tiny.engine(tiny.files_of(folder))


def test_openmp_is_told_not_to_spin_before_torch_is_loaded() -> None:
    code = "import services.engine.torch_engine as t, os, sys; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["False", "PASSIVE"]
