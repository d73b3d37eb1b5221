"""What ends a command with one line for the person at the terminal, and no traceback."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2


class CommandError(Exception):
    """The text is one line that says what is wrong and what to do."""
