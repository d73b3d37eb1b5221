"""How long work shows itself: lines and bars, behind one small protocol, so that the store itself never prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from services.clock import Clock
from services.telemetry.logs import AtMost, fields

LOG_EVERY_S = 5.0
Advance = Callable[[int], None]


class Progress(Protocol):
    """`interactive`: a person watches a terminal, so a child process may draw its own bar there."""

    @property
    def interactive(self) -> bool: ...

    def say(self, line: str) -> None: ...

    def warn(self, line: str) -> None:
        """Something is wrong that may pass."""
        ...

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """A bar of `total` bytes; the function it gives moves it by so many bytes, back if need be."""
        ...


class Silent:
    """Shows nothing."""

    interactive = False

    def say(self, line: str) -> None:
        """Ignored."""

    def warn(self, line: str) -> None:
        """Ignored."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        yield lambda count: None


class Terminal:
    """Lines and tqdm bars on `stream` (standard error unless given); no bars where it is not a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.interactive = self._stream.isatty()

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def warn(self, line: str) -> None:
        self.say(line)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        if not self.interactive:
            yield lambda count: None
            return
        from tqdm import tqdm  # only where bars are shown: worker images do not carry it

        with tqdm(total=total, desc=label, unit="B", unit_scale=True, file=self._stream) as bar:
            yield lambda count: bar.update(count) and None


class Logged:
    """Lines of the log, and for whoever asks meanwhile: what is done now, for how long, how far it is, what was wrong last.

    `trouble` is forgotten as soon as something moves.
    """

    interactive = False

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self.doing = ""
        self.done = self.total = 0
        self.trouble = ""
        self._since = clock.monotonic()

    @property
    def for_s(self) -> float:
        """Seconds for which it has been doing that."""
        return self._clock.monotonic() - self._since

    def begin(self, label: str) -> None:
        """Something that does not say how far it is."""
        self._log.info("%s", label)
        self._now(label, 0)

    def say(self, line: str) -> None:
        self._log.info("%s", line)

    def warn(self, line: str) -> None:
        self._log.warning("%s", line)
        self.trouble = line

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        self._now(label, total)
        began, may_log = self._clock.monotonic(), AtMost(self._clock.monotonic, LOG_EVERY_S)

        def advance(count: int) -> None:
            self.done += count
            self.trouble = ""
            if may_log() is not None:
                self._log.info("%s", label, extra=fields(mb=round(self.done / 1e6), of=round(total / 1e6)))

        yield advance
        self._log.info("%s: done", label, extra=fields(mb=round(total / 1e6), s=round(self._clock.monotonic() - began, 1)))

    def _now(self, label: str, total: int) -> None:
        self.doing, self.done, self.total, self.trouble = label, 0, total, ""
        self._since = self._clock.monotonic()
