"""An error that a service logs is a bug: faults around it are expected, failures of its own are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Notice(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        reason = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._found.append(f"{record.name} said: {record.getMessage()}{reason}")


@contextmanager
def errors_noticed(found: list[str]) -> Iterator[None]:
    """Errors go to `found` and nowhere else; what is less is not said."""
    root, before = logging.getLogger(), logging.root.manager.disable
    handlers, root.handlers = root.handlers, [_Notice(found)]
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        root.handlers = handlers
        logging.disable(before)
