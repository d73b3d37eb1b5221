"""The end of a TensorRT-LLM engine, which is bounded: its own shutdown may wait for ranks that are dead.

Invariant: whoever calls `end` goes on within the time given, and the process is gone one such time later if the engine's threads
would keep it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from services.engine.trtllm_engine.api import Llm

_log = logging.getLogger(__name__)
EXIT_CODE = 1


def _exit_now() -> None:
    os._exit(EXIT_CODE)


async def end(llm: Llm, within: float, exit_now: Callable[[], object] = _exit_now) -> bool:
    """`llm.shutdown()` in a thread that nobody waits for. False when it took longer than `within` seconds, or failed."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def shut_down() -> None:
        try:
            llm.shutdown()
        except BaseException as error:  # the package raises what it likes; this thread has nobody above it
            failed.append(error)
        with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=shut_down, name="tensorrt-llm shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(within):
            await done.wait()
    except TimeoutError:
        _log.critical("the engine did not shut down in %.0f s; this process ends without it", within)
        _exit_later(within, exit_now)
        return False
    if failed:
        _log.error("the engine's shutdown failed: %r", failed[0])
        _exit_later(within, exit_now)
    return not failed


def _exit_later(seconds: float, exit_now: Callable[[], object]) -> None:
    """What the package registered for the interpreter's exit may hang as its shutdown did."""
    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()
