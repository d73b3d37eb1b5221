"""The set-up of the Makefile, with Pythons that only note what they are asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
PYTHON = """#!/bin/sh
# A Python that runs: `-c` succeeds, `-m venv DIR` puts a copy of itself there, everything else is noted.
case "$*" in
  "-c "*) exit 0 ;;
  "--version") echo "Python 3.11.7" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv" >> "{notes}" ;;
  *"pip --version"*) ;;
  *install*) [ -z "$FAIL" ] && echo "install $*" >> "{notes}" ;;
esac
"""


class Checkout:
    """The Makefile beside empty inputs, and a PATH whose Pythons are fakes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.bin = folder / "bin"
        self.notes = folder / "notes"
        self.folder.mkdir()
        self.bin.mkdir()
        shutil.copy(ROOT / "Makefile", self.folder)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.folder / name).touch()
        for name in ("make", "sh", "sed", "rm", "mkdir", "touch", "cp", "echo", "flock", "true"):
            (self.bin / name).symlink_to(str(shutil.which(name)))

    def python(self, name: str, source: str) -> None:
        path = self.bin / name
        path.write_text(source.format(notes=self.notes))
        path.chmod(0o755)

    def make(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "make"), *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def noted(self) -> list[str]:
        """The first word of what was noted since the last call."""
        words = [line.split()[0] for line in self.notes.read_text().splitlines()] if self.notes.exists() else []
        self.notes.write_text("")
        return words


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    one = Checkout(tmp_path)
    one.python("python3.11", SHIM)
    one.python("python3.12", SHIM)
    one.python("python3", PYTHON)
    return one


def test_the_first_python_that_runs_is_taken_once(checkout: Checkout) -> None:
    done = checkout.make(".venv/.local")
    assert done.returncode == 0, done.stderr
    assert checkout.noted() == ["venv", "install"]
    assert "MB to download" in done.stdout
    assert checkout.make(".venv/.local").returncode == 0
    assert checkout.noted() == []


def test_no_python_is_one_line(checkout: Checkout) -> None:
    checkout.python("python3", SHIM)
    done = checkout.make(".venv/.local")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith("Headrace needs Python 3.11 or 3.12 and found none that runs")
    assert "pyenv" not in done.stderr


def test_a_python_can_be_named(checkout: Checkout) -> None:
    checkout.python("python3", SHIM)
    checkout.python("python3.11-of-mine", PYTHON)
    assert checkout.make(".venv/.local", "PYTHON=python3.11-of-mine").returncode == 0
    assert checkout.noted() == ["venv", "install"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_are_installed_into_the_same_venv(checkout: Checkout, changed: str) -> None:
    checkout.make(".venv/.local")
    checkout.noted()
    later = (checkout.folder / ".venv" / ".local").stat().st_mtime + 10
    os.utime(checkout.folder / changed, (later, later))
    assert checkout.make(".venv/.local").returncode == 0
    assert checkout.noted() == ["install"]


def test_the_test_tools_include_what_up_needs(checkout: Checkout) -> None:
    checkout.make(".venv/.dev")
    checkout.noted()
    assert checkout.make(".venv/.local").returncode == 0
    assert checkout.noted() == []


def test_a_half_made_venv_is_made_anew(checkout: Checkout) -> None:
    assert checkout.make(".venv/.local", FAIL="1").returncode != 0
    assert checkout.noted() == ["venv"]
    stale = checkout.folder / ".venv" / "stale"
    stale.touch()
    assert checkout.make(".venv/.local").returncode == 0
    assert checkout.noted() == ["venv", "install"]
    assert not stale.exists()


def test_a_venv_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.make(".venv/.local")
    checkout.noted()
    (checkout.folder / ".venv" / "bin" / "python").unlink()
    assert checkout.make(".venv/.local").returncode == 0
    assert checkout.noted() == ["venv", "install"]


def test_an_extra_index_reaches_pip(checkout: Checkout) -> None:
    checkout.make(".venv/.local", "TORCH_INDEX=https://torch.example/cpu")
    assert "--extra-index-url https://torch.example/cpu" in checkout.notes.read_text()
    assert "-c constraints.txt" in checkout.notes.read_text()
