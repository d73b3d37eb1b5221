"""One service as one operating-system process: event loop, signals, logs, exit code.

Knows nothing of what a service does. Invariant: the first SIGTERM or SIGINT asks it to drain, the second ends it at once.

Exit codes: 0 it stopped because it was asked to, 1 it could not go on (one line says why), 2 its settings are wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from schemas.errors import HeadraceError
from services.cli.failure import EXIT_FAILED, EXIT_USAGE, CommandError
from services.cli.short_turns import take_short_turns
from services.models.errors import ModelError
from services.settings.errors import SettingsError
from services.settings.settings import Settings
from services.telemetry.collector import keep_collections_short
from services.telemetry.logs import configure

Serve = Callable[[Settings, str, asyncio.Event, Callable[[], None]], Awaitable[None]]
"""`serve(settings, process, stop, loaded)`: calls `loaded` once it is about to serve, runs until `stop` is set, drains, closes,
returns."""

_EXPECTED = (HeadraceError, ModelError, CommandError, OSError)
"""What a sentence explains better than a traceback."""
ALIVE_EVERY_S = 2.0
_log = logging.getLogger("headrace.process")


def run(serve: Serve, settings: Settings, process: str) -> int:
    """Run `serve` to its end; the exit code."""
    configure(settings.log_level, process)
    take_short_turns()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(serve, settings, process))
    except SettingsError as error:  # what only shows when it is tried: too few KV blocks for the model, no such device
        _log.error(str(error))
        return EXIT_USAGE
    except _EXPECTED as error:
        _log.error(str(error) or type(error).__name__)
        return EXIT_FAILED
    except Exception:
        _log.exception("ended by an error")
        return EXIT_FAILED
    return 0


async def _until_stopped(serve: Serve, settings: Settings, process: str) -> None:
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        _log.info("stopping on %s", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    living = asyncio.create_task(_show_life(settings.alive_file))
    try:
        await serve(settings, process, stop, keep_collections_short)
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)


async def _show_life(path: Path | None) -> None:
    """The file's date is the last time at which the event loop turned."""
    while path is not None:
        _touch(path)
        await asyncio.sleep(ALIVE_EVERY_S)


def _touch(path: Path) -> None:
    """On the event loop, which is what it shows. A file that cannot be touched is told of, and grows old."""
    try:
        path.touch()
    except OSError as error:
        _log.warning("alive_file: %s: %s", path, error.strerror)
