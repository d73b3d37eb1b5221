"""How long work shows itself: lines and bars, behind one small protocol, so that the store itself never prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

Advance = Callable[[int], None]


class Progress(Protocol):
    """`interactive`: a person watches a terminal, so a child process may draw its own bar there."""

    @property
    def interactive(self) -> bool: ...

    def say(self, line: str) -> None: ...

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """A bar of `total` bytes; the function it gives moves it by so many bytes."""
        ...


class Silent:
    """Shows nothing."""

    interactive = False

    def say(self, line: str) -> None:
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

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        if not self.interactive:
            yield lambda count: None
            return
        from tqdm import tqdm  # only where bars are shown: worker images do not carry it

        with tqdm(total=total, desc=label, unit="B", unit_scale=True, file=self._stream) as bar:
            yield lambda count: bar.update(count) and None
