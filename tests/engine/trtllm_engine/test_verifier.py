"""The static verifier: it passes what agrees with the contract, names what does not, and never passes what it did not read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import main
from services.engine.trtllm_engine.findings import Verdict
from services.engine.trtllm_engine.verifier import verify
from tests.engine.trtllm_engine import package


def test_a_package_that_agrees_passes(tmp_path: Path) -> None:
    report = verify(package.write(tmp_path))
    assert (report.verdict, report.wrong) == (Verdict.PASSED, ())


def test_without_the_wheel_it_is_skipped_and_never_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(None).verdict is Verdict.SKIPPED
    assert verify(tmp_path).verdict is Verdict.SKIPPED, "PyPI's own 1.2.1 is a stub"
    assert main(["verify", "trtllm", "--package", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "skipped: no wheel" in said
    assert "passed" not in said


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "trtllm", "--package", str(package.write(tmp_path / "same"))]) == 0
    assert capsys.readouterr().out.endswith("passed\n")
    other = package.write(tmp_path / "other", lambda name, text: text.replace("1.2.1", "1.3.0"))
    assert main(["verify", "trtllm", "--package", str(other)]) == 1
    said = capsys.readouterr().out
    assert "BAD version" in said
    assert said.endswith("failed\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("version.py", "1.2.1", "1.2.0", "version.py says '1.2.0', not 1.2.1"),
        ("version.py", "1.2.1", "1.2.10", "'1.2.10'"),
        ("version.py", '"1.2.1"', '"1.3.0"  # what "1.2.1" became', "'1.3.0'"),
        ("version.py", "__version__", "version", "says None"),
        ("llmapi/llm.py", "streaming: Any = False, ", "", "streaming is missing"),
        ("llmapi/llm.py", "cache_salt: Any = None", "cache_salt: Any = None, priority: Any = 0.5", "priority is there"),
        ("llmapi/llm.py", "timeout: Any = 2", "timeout: Any = 5", "timeout defaults to 5, not 2"),
        ("llmapi/llm.py", "streaming: Any = False, kv_cache_", "kv_cache_", "streaming is missing"),
        ("disaggregated_params.py", "slots=True, ", "", "dataclass is not slots=True"),
        ("disaggregated_params.py", "    opaque_state", "    opaque", "opaque_state is missing"),
        ("disaggregated_params.py", "    draft_tokens", "    ctx_dp_rank: int = None\n    draft_tokens", "ctx_dp_rank is there"),
        (
            "llmapi/llm_args.py",
            "tokens_per_block: object = Field(default=32",
            "tokens_per_block: object = Field(default=64",
            "32",
        ),
        ("llmapi/llm_args.py", "    kv_transfer_timeout_ms", "    transfer_timeout_ms", "kv_transfer_timeout_ms is missing"),
        ("executor/result.py", "    def abort(", "    def stop(", "abort is missing"),
        ("executor/utils.py", "RuntimeError", "Exception", "RequestError"),
        ("_utils.py", '"parent_hash", ', "", "parent_hash is missing"),
        ("sampling_params.py", "    end_id", "    eos_id", "end_id is missing"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    def edit(name: str, text: str) -> str:
        assert name != file or old in text
        return text.replace(old, new, 1) if name == file else text

    report = verify(package.write(tmp_path, edit))
    assert report.verdict is Verdict.FAILED
    assert any(said in line for line in report.wrong), report.wrong


@pytest.mark.parametrize("file", ["llmapi/llm_args.py", "executor/result.py", "disaggregated_params.py"])
def test_a_file_that_is_missing_or_no_python_is_wrong(tmp_path: Path, file: str) -> None:
    whole = package.write(tmp_path / "whole")
    (whole / file).unlink()
    assert verify(whole).verdict is Verdict.FAILED
    broken = package.write(tmp_path / "broken", lambda name, text: "def (" if name == file else text)
    assert verify(broken).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    "content",
    [
        b"\0",
        b"x = 1\0",
        b"\xff\xfe",
        b"(" * 100_000,
        b"-" * 100_000 + b"1",
        b"class LLM(x.LLM):\n    pass\n",
        b"a = {[]: 0}\n",
        b"",
    ],
    ids=["zero", "a zero behind", "no UTF-8", "brackets", "signs", "its own base", "no literal", "empty"],
)
@pytest.mark.parametrize("file", ["version.py", "llmapi/llm.py"])
def test_damage_of_any_kind_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes) -> None:
    damaged = package.write(tmp_path)
    (damaged / file).write_bytes(content)
    assert main(["verify", "trtllm", "--package", str(damaged)]) == 1
    said = capsys.readouterr().out
    assert "BAD " + ("version" if file == "version.py" else "llmapi.LLM.__init__") in said
    assert said.endswith("failed\n")


def test_a_part_of_a_package_is_broken_not_absent(tmp_path: Path) -> None:
    (tmp_path / "cpp").mkdir()
    assert verify(tmp_path).verdict is Verdict.SKIPPED
    (tmp_path / "__init__.py").write_text("")
    report = verify(tmp_path)
    assert report.verdict is Verdict.FAILED
    assert "version: version.py says None, not 1.2.1" in report.wrong


def test_a_package_that_agrees_and_cannot_be_imported_is_one_clear_line(tmp_path: Path) -> None:
    """As on a machine without libcuda.so.1."""
    found = package.write(tmp_path)
    (found / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    code = "from services.engine.trtllm_engine.api import load; load()"
    search = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    ran = subprocess.run([sys.executable, "-c", search + code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.endswith(
        "SettingsError: worker.engine: tensorrt_llm cannot be imported here: libcuda.so.1: cannot open shared object file"
    )


def test_another_default_of_a_neighbouring_version_is_a_note(tmp_path: Path) -> None:
    def edit(name: str, text: str) -> str:
        return text.replace("stream_interval: object = Field(default=1", "stream_interval: object = Field(default=2")

    report = verify(package.write(tmp_path, edit))
    assert report.verdict is Verdict.PASSED
    assert any("stream_interval" in note for note in report.notes)


def test_nothing_of_the_package_is_run(tmp_path: Path) -> None:
    found = package.write(tmp_path, lambda name, text: text + "\nraise SystemExit('it was imported')\n")
    (found / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    code = "from services.engine.trtllm_engine.verifier import find, verify; print(find(), verify(find()).verdict)"
    search = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    ran = subprocess.run([sys.executable, "-c", search + code], capture_output=True, text=True, timeout=60, check=True)
    assert str(found) in ran.stdout
    assert "passed" in ran.stdout
