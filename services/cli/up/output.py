"""What children say: all of it into `<home>/logs/<name>.log`, warnings (or everything) to the terminal.

Knows the two line formats it may see: our own (services/telemetry/logs.py) and nats-server's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
"""A log file that grows over this becomes `<name>.log.1`; the one before is forgotten."""
MAX_SHOWN = 400
"""Characters of a line on the terminal; the file has all of it."""
_OURS = re.compile(r"^\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ (.*)")
_NATS = re.compile(r"^\[\d+\] \S+ \S+ \[(TRC|DBG|INF|WRN|ERR|FTL)\] (.*)")
_LOGGER = re.compile(r"^headrace\.\S+ ")
_SHOWN = frozenset({"WARNING", "ERROR", "CRITICAL", "ERR", "FTL"})
"""nats-server's WRN is left out: it warns of plain-text passwords in a file that only its owner may read."""

Say = Callable[[str], None]


class LogFile:
    """Lines appended to a file that never grows over `limit` bytes. Unbuffered: what could not be written is not tried again."""

    def __init__(self, path: Path, limit: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> str:
        """Why it could not be written, such as a full disk; "" when it was."""
        try:
            if self._file.tell() > self._limit:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                full, self._file = self._file, self.path.open("ab", buffering=0)
                full.close()
            self._file.write(f"{line}\n".encode("utf-8", "replace"))
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def close(self) -> None:
        self._file.close()


class Output:
    """Takes the lines of one child, over all its runs."""

    def __init__(self, name: str, file: LogFile, say: Say, *, verbose: bool) -> None:
        self._name = name
        self._file = file
        self._say = say
        self._verbose = verbose
        self._complained = False
        self.last_words = ""
        """The latest line that may tell why it died, without its logger: a complaint, or one that is in no known format."""

    @property
    def path(self) -> Path:
        return self._file.path

    def __call__(self, line: str) -> None:
        self._keep(line)
        known = _OURS.match(line) or _NATS.match(line)
        level, text = known.groups() if known else ("", line)
        if text.strip() and (not known or level in _SHOWN):
            self.last_words = shorten(_LOGGER.sub("", text.strip()))
        if self._verbose or level in _SHOWN:
            self._say(shorten(f"{self._name}: {level} {text}" if level else f"{self._name}: {text}"))

    def _keep(self, line: str) -> None:
        """Into the file. That it cannot be is said once, until it can again; the child must not wait for us to read on."""
        trouble = self._file.write(line)
        if trouble and not self._complained:
            self._say(f"{self._name}: its log {self.path} is not written: {trouble}")
        self._complained = bool(trouble)

    def close(self) -> None:
        self._file.close()


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
