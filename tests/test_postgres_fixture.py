"""Tests that need PostgreSQL: where there is none they are skipped and the summary says so; in CI they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres_fixture import MISSING

ROOT = Path(__file__).parents[1]
_WITHOUT = """
import sys
import pytest
from tests import postgres_fixture
postgres_fixture._FOLDERS = ()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/edge/store/test_accounts.py"]))
"""
"""As on a machine that has none."""


def outcome(folder: Path, ci: str) -> tuple[int, str]:
    """The exit status, and what pytest printed. `folder` is the whole path."""
    environment = {**os.environ, "PATH": str(folder), "CI": ci}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_there_is_none_the_summary_says_so(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, ci="")
    assert status == pytest.ExitCode.OK, said
    assert f"skipped: {MISSING}" in said.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_ci_that_is_a_failure(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, ci="true")
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert MISSING in said
