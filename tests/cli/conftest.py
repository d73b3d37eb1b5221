"""`headrace` as a test calls it."""

from __future__ import annotations

import pytest

from services.cli.main import main


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What the command printed, standard error after standard output."""
        assert main(arguments) == code
        captured = self._capsys.readouterr()
        return captured.out + captured.err


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
