"""One line per event on stderr: time, level, process, logger, message, then `key=value` fields.

    log.info("worker left", extra=fields(worker=worker, cause="killed"))

Never prompts, generated text, keys or credentials.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

_FIELDS = "headrace_fields"


def fields(**values: object) -> dict[str, object]:
    """The `extra=` of a log call."""
    return {_FIELDS: values}


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO d1-0k3v9x… headrace.worker drained runs=3`; tracebacks stay on the line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._process} {record.name} {record.getMessage()}"
        values: dict[str, object] = dict(getattr(record, _FIELDS, {}))
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return _one_line(line) + "".join(f" {key}={_value(value)}" for key, value in values.items())


def configure(level: str, process: str, stream: TextIO | None = None) -> None:
    """Make the root logger write structured lines. Raises ValueError for an unknown level."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]


class AtMost:
    """Lets one call in `period` seconds through, so that a flood of bad messages is not a flood of lines."""

    __slots__ = ("_next", "_now", "_period", "suppressed")

    def __init__(self, now: Callable[[], float], period: float = 1.0) -> None:
        self._now = now
        self._period = period
        self._next = float("-inf")
        self.suppressed = 0
        """Calls held back since the last one let through."""

    def __call__(self) -> int | None:
        """How many calls were held back since the last one let through; None when this one is held back too."""
        now = self._now()
        if now < self._next:
            self.suppressed += 1
            return None
        self._next = now + self._period
        held, self.suppressed = self.suppressed, 0
        return held


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text and '"' not in text else json.dumps(text)
