"""Building the kernel: once a machine, whole or not at all, and a reason in words when it cannot be."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.engine.torch_engine.kernel.compiler import KernelUnavailable, build, find_compiler
from services.engine.torch_engine.kernel.library import Library
from services.engine.torch_engine.kernel.start import load_kernel

TINY = "int hr_version(void) { return 1; }\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "kernel.c").write_text(TINY)
    return folder


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that leaves a line in a log for each file it compiles."""
    log, script = tmp_path / "log", tmp_path / "counting-cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *kernel.c*) echo built >> {log};; esac\nexec {find_compiler().path} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    log.touch()
    return log


def test_it_is_compiled_once(tmp_path: Path, source: Path, counted: Path) -> None:
    libraries = {build(tmp_path / "cache", find_compiler(), source=source) for _ in range(3)}
    assert len(libraries) == 1
    assert counted.read_text() == "built\n"


@pytest.mark.parametrize("change", ["source", "flags"])
def test_another_source_or_flag_is_another_library(tmp_path: Path, source: Path, change: str) -> None:
    first = build(tmp_path, find_compiler(), source=source)
    if change == "source":
        (source / "more.h").write_text("")
    other = build(tmp_path, find_compiler(), source=source, target=() if change == "flags" else ("-march=native",))
    assert other != first
    assert first.is_file()
    assert other.is_file()


def test_of_workers_that_start_together_one_builds_and_all_get_a_whole_library(
    tmp_path: Path, source: Path, counted: Path
) -> None:
    with ThreadPoolExecutor(4) as workers:
        built = [workers.submit(build, tmp_path / "cache", find_compiler(), source=source) for _ in range(4)]
        assert len({future.result() for future in built}) == 1
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".so"]
    assert counted.read_text() == "built\n"


def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
    (source / "kernel.c").write_text("#error no luck today\n")
    with pytest.raises(KernelUnavailable, match="no luck today"):
        build(tmp_path / "cache", find_compiler(), source=source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(KernelUnavailable, match=r"no C compiler \(nowhere-cc\)"):
        find_compiler(["nowhere-cc"])


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="needs a place where root cannot write")
def test_a_folder_that_cannot_be_written(source: Path) -> None:
    with pytest.raises(KernelUnavailable, match="cannot write /proc/"):
        build(Path("/proc/headrace"), find_compiler(), source=source)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(KernelUnavailable, match="cannot load"):
        Library(tmp_path / "x.so")


def test_a_library_that_lacks_functions(tmp_path: Path, source: Path) -> None:
    with pytest.raises(KernelUnavailable, match="hr_version"):
        Library(build(tmp_path, find_compiler(), source=source))


def test_without_a_compiler_there_is_a_line_and_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "nowhere-cc")
    assert load_kernel(tmp_path) is None
    assert "no C compiler (nowhere-cc) on the path" in caplog.text
    assert "pure torch" in caplog.text
