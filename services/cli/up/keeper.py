"""Keeps one program running: starts it, sees it die, waits a little longer each time, starts it again.

Invariant: after `stop` returns nothing of the program runs, and nothing starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.cli.failure import EXIT_USAGE, CommandError
from services.cli.up.child import Child, describe
from services.cli.up.output import Output, Say
from services.clock import Clock

FIRST_DELAY_S = 0.25
LAST_DELAY_S = 15.0
STABLE_AFTER_S = 30.0
"""A run that lasted this long starts the delays from the beginning."""
EXIT_NOT_STARTED = 127
"""As shells say it of a program that could not be run."""
TRIES_BEFORE_READY = 3
"""A program that never worked is given up after so many runs; one that worked is started again for ever."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `--id <process id>`, a new one each time, is appended to `argv` when `identified`.

    `stop_within_s`: seconds between SIGTERM and SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_within_s: float
    identified: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """What a keeper needs of the world. `exited(process, code)` is told of every end of an identified program."""

    clock: Clock
    say: Say
    new_id: Callable[[str], str]
    exited: Callable[[str, int], None]


class Keeper:
    """One program, over all its runs. `run()` ends after `stop`, or raises `CommandError` when it never works."""

    def __init__(self, program: Program, output: Output, watch: Watch) -> None:
        self.program = program
        self._output = output
        self._watch = watch
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self.settled = False
        """Set once the whole has worked: from then on it is started again without end."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def run(self) -> None:
        failures = 0
        self._ended.clear()
        try:
            while not self._stopping.is_set():
                started = self._watch.clock.monotonic()
                code = await self._run_once()
                if self._stopping.is_set():
                    return
                stable = self._watch.clock.monotonic() - started >= STABLE_AFTER_S
                failures = 1 if stable else failures + 1
                await self._pause(code, failures)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ask, wait, then kill. Safe to call again, and before `run`."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()
        try:
            async with asyncio.timeout(self.program.stop_within_s):
                await self._ended.wait()
        except TimeoutError:
            self._watch.say(f"{self.program.name} did not stop in {self.program.stop_within_s:g} s: killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """End it now, and for good."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _run_once(self) -> int:
        process = self._watch.new_id(self.program.name)
        argv = (*self.program.argv, "--id", process) if self.program.identified else self.program.argv
        self._output.last_words = ""
        try:
            child = self._child = await Child.start(argv, self.program.env, self._output)
        except OSError as error:  # no memory, no descriptors, or the program is just being replaced
            if not self.settled:
                raise
            self._output.last_words = str(error)
            return EXIT_NOT_STARTED
        try:
            if self._stopping.is_set():  # asked while it was being started
                child.terminate()
            code = await child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            self._child = None
        if self.program.identified:
            self._watch.exited(process, code)
        return code

    async def _pause(self, code: int, failures: int) -> None:
        why = f": {self._output.last_words}" if self._output.last_words else ""
        if not self.settled and (code == EXIT_USAGE or failures >= TRIES_BEFORE_READY):
            raise CommandError(f"{self.program.name} does not start ({describe(code)}){why} (log: {self._output.path})")
        delay = backoff(failures)
        self._watch.say(f"{self.program.name}: {describe(code)}{why}; starting it again in {delay:g} s")
        try:
            async with asyncio.timeout(delay):
                await self._stopping.wait()
        except TimeoutError:
            return


def backoff(failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(FIRST_DELAY_S * 2.0 ** min(failures - 1, 16), LAST_DELAY_S)
