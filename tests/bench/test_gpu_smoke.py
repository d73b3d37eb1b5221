"""The GPU's checks on a CPU: they pass on a sound engine, fail on one that is not, and say when there is nothing to check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench.gpu_smoke
from bench.gpu_smoke import SKIPPED, main
from services.engine.torch_engine.model import Llama
from tests.engine.torch_engine import tiny

SCRIPT = Path(bench.gpu_smoke.__file__)
ON_A_CPU = ("--device", "cpu", "--dtype", "float32", "--kv-blocks", "700")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make(tmp_path_factory.mktemp("smoke") / "tiny", num_hidden_layers=2).files.folder
    (made / "tokenizer.json").write_text("{}")
    return made


def run(folder: Path, *arguments: str) -> int:
    return main([*ON_A_CPU, "--model", str(folder), *arguments])


@pytest.mark.timeout(300)
def test_a_sound_engine_passes_every_check(folder: Path) -> None:
    """As the file that a person runs."""
    argv = [sys.executable, str(SCRIPT), *ON_A_CPU, "--model", str(folder), "--tie", "0.001"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for row in ("greedy, 16 in a batch", "prefix hit", "cancel", "handoff of 128 tokens, shm", "handoff of 128 tokens, tcp"):
        assert row in said
    assert "FAILED" not in said
    assert "tokens/s" in said


def test_wrong_tokens_fail(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda *arguments: -forward(*arguments))
    assert run(folder) == 1
    assert "FAILED" in capsys.readouterr().out


def test_without_a_gpu_it_is_skipped_and_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == SKIPPED
    assert capsys.readouterr().out == "skipped: no GPU\n"
