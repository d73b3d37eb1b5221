"""What reaches the terminal, what reaches the file, and that the file stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.up.output import LogFile, Output, shorten
from tests.cli.programs import output

INFO = "2026-01-31T12:00:00.123Z INFO d1-0k3v9x00abcde headrace.worker ready blocks=64"
WARNING = "2026-01-31T12:00:00.123Z WARNING d1-0k3v9x00abcde headrace.bus the connection to NATS is lost"
NATS_INFO = "[7969] 2026/11/29 16:53:50.533370 [INF] Server is ready"
NATS_WARNING = "[7969] 2026/11/29 16:53:50.530722 [WRN] Plaintext passwords detected, use nkeys or bcrypt"
NATS_ERROR = '[7969] 2026/11/29 16:53:51.119479 [ERR] 127.0.0.1:43194 - cid:6 - Publish Violation - Subject "hr.foo"'
FOREIGN = "Fatal Python error: Segmentation fault"
ALL = [INFO, WARNING, NATS_INFO, NATS_WARNING, NATS_ERROR, FOREIGN]


def feed(one: Output) -> None:
    for line in ALL:
        one(line)


def test_only_complaints_are_shown(tmp_path: Path) -> None:
    said: list[str] = []
    with output(tmp_path, "d1", said) as one:
        feed(one)
    assert said == [
        "d1: WARNING headrace.bus the connection to NATS is lost",
        'd1: ERR 127.0.0.1:43194 - cid:6 - Publish Violation - Subject "hr.foo"',
    ]
    assert (tmp_path / "d1.log").read_text().splitlines() == ALL


def test_verbose_shows_everything(tmp_path: Path) -> None:
    said: list[str] = []
    with output(tmp_path, "d1", said, verbose=True) as one:
        feed(one)
    assert len(said) == len(ALL)
    assert said[0] == "d1: INFO headrace.worker ready blocks=64"


@pytest.mark.parametrize(
    ("lines", "last"),
    [([INFO, WARNING, INFO], "the connection to NATS is lost"), ([WARNING, FOREIGN, ""], FOREIGN), ([INFO], "")],
)
def test_last_words_tell_why(tmp_path: Path, lines: list[str], last: str) -> None:
    with output(tmp_path, "d1", []) as one:
        for line in lines:
            one(line)
        assert one.last_words == last


def test_a_log_file_is_rotated(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "p1.log", limit=100)
    for number in range(50):
        log.write(f"line {number:04}")
    log.close()
    assert log.path.stat().st_size <= 120
    assert (tmp_path / "logs" / "p1.log.1").read_text()
    assert log.path.read_text().endswith("line 0049\n")


def test_long_lines_are_shortened_on_the_terminal_only(tmp_path: Path) -> None:
    said: list[str] = []
    with output(tmp_path, "d1", said) as one:
        one(WARNING + "x" * 1000)
    assert len(said[0]) == 400
    assert "x" * 1000 in (tmp_path / "d1.log").read_text()
    assert shorten("short") == "short"


def test_a_full_disk_is_said_once_and_stops_nothing() -> None:
    said: list[str] = []
    one = Output("d1", LogFile(Path("/dev/full")), said.append, verbose=False)
    feed(one)
    one.close()
    assert [line for line in said if "not written" in line] == ["d1: its log /dev/full is not written: No space left on device"]
    assert "d1: WARNING headrace.bus the connection to NATS is lost" in said
    assert one.last_words == FOREIGN
