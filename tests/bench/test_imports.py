"""Every bench can be started: what it takes from services and tests is still there, and has the arguments that it gives."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import bench

ENDING = ("[attr-defined]", "[call-arg]", "[name-defined]", "[import-not-found]")
MODULES = sorted(module.name for module in pkgutil.walk_packages(bench.__path__, "bench."))


@pytest.mark.slow
def test_all_can_be_imported() -> None:
    subprocess.run([sys.executable, "-c", "\n".join(f"import {module}" for module in MODULES)], check=True, timeout=100)


@pytest.mark.slow
def test_its_calls_fit() -> None:
    """Of mypy's findings only those that end a bench when it runs into them."""
    command = [sys.executable, "-m", "mypy", "-p", "bench"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.stdout.splitlines()[-1].startswith(("Found", "Success")), found.stderr
    assert [line for line in found.stdout.splitlines() if line.startswith("bench/") and line.endswith(ENDING)] == []
