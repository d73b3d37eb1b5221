"""Every bench can be started: what it takes from services and tests is still there, and has the arguments that it gives."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import bench

MODULES = sorted(module.name for module in pkgutil.walk_packages(bench.__path__, "bench."))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_can_be_imported() -> None:
    subprocess.run([sys.executable, "-c", "\n".join(f"import {module}" for module in MODULES)], check=True, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_its_calls_fit() -> None:
    """Minutes, where mypy has not been before."""
    command = [sys.executable, "-m", "mypy", "-p", "bench"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
