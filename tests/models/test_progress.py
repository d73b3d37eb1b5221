"""Bars on a terminal only; lines always."""

from __future__ import annotations

import io

from services.models.progress import Terminal


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def used(stream: io.StringIO) -> str:
    terminal = Terminal(stream)
    terminal.say("hello")
    with terminal.bar("Converting", 10) as advance:
        advance(4)
        advance(6)
    return stream.getvalue()


def test_a_terminal_shows_a_bar() -> None:
    shown = used(FakeTerminal())
    assert shown.startswith("hello\n")
    assert "Converting" in shown
    assert "100%" in shown


def test_a_log_file_gets_lines_only() -> None:
    assert used(io.StringIO()) == "hello\n"
