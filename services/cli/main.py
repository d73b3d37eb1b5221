"""`headrace <command>`: from the arguments to the exit code.

Invariant: a person's mistake ends in one line on standard error, never in a traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from services.cli.arguments import parser
from services.cli.failure import EXIT_FAILED, EXIT_USAGE, CommandError
from services.cli.start import Command
from services.models.errors import ModelError
from services.settings.errors import SettingsError

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    if not all(map(_is_text, given)):
        return _fail(CommandError("an argument is not UTF-8"), EXIT_USAGE)
    arguments = parser().parse_args(given)
    try:
        command: Command = arguments.run
        return command(arguments)
    except SettingsError as error:
        return _fail(error, EXIT_USAGE)
    except (CommandError, ModelError, OSError) as error:  # a full disk says it well enough itself
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _is_text(argument: str) -> bool:
    """Bytes that are no UTF-8 come as half characters, which nothing can print or store."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _fail(error: Exception, code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)
    return code


def run() -> NoReturn:
    """A process that is one command.

    Once it has asked an object store it ends without Python's own finalization: a thread of obstore that still wants Python's
    lock is ended there in a way that aborts the whole process (SIGABRT, one time in four on a busy machine).
    """
    code = main()
    if "obstore" in sys.modules:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
