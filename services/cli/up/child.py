"""One run of one program: started on a leash, its output line by line, ended with everything it started.

Invariants: a child has a process group of its own, so Ctrl-C in a terminal reaches it only through us, in our order; on
Linux the kernel kills it when we die, whatever we die of.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

MAX_LINE = 16 * 1024
"""Bytes; a longer line is shown in pieces."""
_LAST_WORDS_S = 0.5
"""How long a program's own children may keep its output open after it ended."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork

Sink = Callable[[str], None]


class Child:
    """A started program. `await wait()` exactly once."""

    def __init__(self, process: asyncio.subprocess.Process, output: int, sink: Sink) -> None:
        self._process = process
        self._output = asyncio.create_task(_pump(output, sink))

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], sink: Sink) -> Child:
        """Raises OSError when there is no such program."""
        reading, writing = os.pipe()  # our own: with asyncio's, the end of the program is seen only after the end of the pipe
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_leash(os.getpid()),
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return cls(process, reading, sink)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, or minus the signal that killed it; after that nothing it started is left."""
        code = await self._process.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await asyncio.shield(self._output)
        self.kill()
        self._output.cancel()
        return code

    def terminate(self) -> None:
        """Ask the program, and not what it started, to stop."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all of its process group."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)


def describe(code: int) -> str:
    """`exit code 3` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _leash(parent: int) -> Callable[[], None] | None:
    """What runs in the child before its program: die when the parent does."""
    if _libc is None:
        return None

    def tie() -> None:
        assert _libc is not None
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the fork and the call
            os._exit(1)

    return tie


async def _pump(descriptor: int, sink: Sink) -> None:
    """Give `sink` each line that can be read from `descriptor`, without its end; close it."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", 0))
    try:
        rest = b""
        while data := await stream.read(MAX_LINE):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                sink(_text(line))
            if len(rest) >= MAX_LINE:
                sink(_text(rest))
                rest = b""
        if rest:
            sink(_text(rest))
    finally:
        transport.close()


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
