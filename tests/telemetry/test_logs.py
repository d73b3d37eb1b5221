"""One event is one line, whatever its text holds."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from services.clock import ManualClock
from services.telemetry.logs import AtMost, configure, fields


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("info", "d1-0000000000000", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_names_level_process_logger_and_fields(lines: io.StringIO) -> None:
    logging.getLogger("headrace.worker").info("drained", extra=fields(runs=3, why="a b", empty=""))
    logging.getLogger("headrace.worker").debug("not at this level")
    assert lines.getvalue().rstrip("\n").split("Z ", 1)[1] == (
        'INFO d1-0000000000000 headrace.worker drained runs=3 why="a b" empty=""'
    )


def test_newlines_and_tracebacks_stay_on_the_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("headrace").exception("it\nbroke", extra=fields(text="x\ny"))
    assert lines.getvalue().count("\n") == 1
    assert "ValueError" in lines.getvalue()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError):
        configure("loud", "d1-0000000000000", io.StringIO())


def test_at_most_counts_what_it_held_back() -> None:
    clock = ManualClock()
    may_log = AtMost(clock.monotonic)
    assert [may_log(), may_log(), may_log()] == [0, None, None]
    clock.advance(1.0)
    assert [may_log(), may_log()] == [2, None]
