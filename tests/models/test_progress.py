"""Bars on a terminal only; lines always."""

from __future__ import annotations

import io
import logging

import pytest

from services.clock import ManualClock
from services.models.progress import LOG_EVERY_S, Logged, Terminal


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


def test_a_service_logs_how_far_it_is_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    logged = Logged(logging.getLogger("test"), clock)
    with caplog.at_level(logging.INFO), logged.bar("Fetching tiny", 8_000_000) as advance:
        for _ in range(8):
            advance(1_000_000)
            clock.advance(LOG_EVERY_S / 4)
    assert [record.getMessage() for record in caplog.records] == ["Fetching tiny", "Fetching tiny", "Fetching tiny: done"]
    assert (logged.doing, logged.done, logged.total) == ("Fetching tiny", 8_000_000, 8_000_000)
