"""Which engine computes on how many cores: an arbiter among the engines of one host, without a process of its own.

Each core is a file that one engine at a time holds locked, in memory that all processes of the host share; an engine that dies
holds nothing any more, because the system drops its locks. Cores are counted, not bound: who holds two runs two threads, wherever
the system puts them. Who wants a core and has none holds a lock of its kind, decode or prefill, which the others can see. Rules:

- A step has at least one thread. More cores are taken only when they are free and nobody wants one, also while the step runs;
  they go back with the step, or in the midst of it when somebody wants one.
- The first core stays for some ms, so that engines which compute step after step do not queue anew for each.
- It goes back at once when somebody wants one who comes first: decode before all, prefill after all; and nobody who comes anew
  overtakes those who wait. So a prefill that had every core leaves one to a decode that begins.
- Nobody waits longer than its patience: then it computes in one thread without a core, and the system shares them.
- Beside a prefill with steps to come a decode of few rows rests between two steps, the longer the fewer cores there are: a step
  costs nearly as much with one row as with eight, and prompts that are done sooner make more rows.

Must not know sequences or models. Invariant: a wrong count makes a step slow and nothing else.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import tempfile
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.004
_SHARED_MEMORY = Path("/dev/shm")


def lock_folder() -> Path:
    """The folder for all engines that this user runs on this host. Raises OSError when it cannot be had, or is not ours."""
    base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"headrace-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a step of each kind waits for its first core, and that the core stays behind it.

    For decode few, but more than a prefill that has every core needs to give one back. `rest`: the longest that a decode rests
    between two steps, which adds to what a cancel waits for.
    """

    decode: float = 0.008
    prefill: float = 0.05
    linger: float = 0.005
    rest: float = 0.02


class CoreArbiter:
    """One engine's hand on the cores numbered `cores`: up to `most` of them, 0 = all. One step at a time; on one event loop."""

    def __init__(self, folder: Path, cores: Sequence[int], most: int = 0, *, timing: Timing = Timing()) -> None:
        """Raises OSError."""
        self._timing = timing
        self.most = min(most or len(cores), len(cores))
        self._cores = [_Lock(folder / f"core-{number}") for number in cores]
        self._decode, self._prefill = _Lock(folder / "decode-wants"), _Lock(folder / "prefill-wants")
        self._prefill_goes_on = _Lock(folder / "prefill-goes-on")
        self._held: list[_Lock] = []
        self._wanting: _Lock | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._rest_until = 0.0

    @asynccontextmanager
    async def step(self, *, decode: bool, rest: float = 0.0, more: bool = False) -> AsyncIterator[int]:
        """The number of threads for one step, at least 1. `decode`: somebody's next token is among what it computes.

        `more`: of a prefill, another step follows. `rest`: how long the next decode step waits beside such a prefill, on two
        cores, as a share of what this one takes.
        """
        loop = asyncio.get_running_loop()
        if self._linger is not None:
            self._linger.cancel()
        try:
            if more and not decode:
                self._prefill_goes_on.share()
            else:
                self._prefill_goes_on.unlock()
            if decode:
                await self._rest()
            await self._take_first(decode)
            began = loop.time()
            yield self.reconsider()
            share = rest / max(1, len(self._cores) - 1)
            self._rest_until = loop.time() + min(self._timing.rest, share * (loop.time() - began))
        finally:
            self._give_back(keep=0 if self._somebody_wants(*self._before(decode)) else 1)
            self._linger = loop.call_later(self._timing.linger, self._go_idle)

    def reconsider(self) -> int:
        """In a step: gives back what somebody wants, else takes what is free. The threads that it may have from now on."""
        if self._wanting is not None and self._take_fairly(decode=self._wanting is self._decode):
            self._want_nothing()
        if self._somebody_wants(self._decode, self._prefill):
            self._give_back(keep=1)
        elif self._held:
            self._take(self.most)
        return max(1, len(self._held))

    def close(self) -> None:
        """Gives everything back. No step may be in progress."""
        if self._linger is not None:
            self._linger.cancel()
        for lock in (*self._cores, self._decode, self._prefill, self._prefill_goes_on):
            lock.close()
        self._held.clear()

    async def _rest(self) -> None:
        """Until the last step's rest is over, beside a prefill that goes on."""
        rest = self._rest_until - asyncio.get_running_loop().time()
        if rest > 0 and not self._prefill_goes_on.is_free():
            self._give_back(keep=0)
            self._want_nothing()
            await asyncio.sleep(rest)

    async def _take_first(self, decode: bool) -> None:
        """One core, if there is one in time; without one this engine wants one, until it has it or rests."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._timing.decode if decode else self._timing.prefill)
        pause = _FIRST_PAUSE_S
        if self._wanting is None and self._somebody_wants(*self._before(decode)):
            self._give_back(keep=0)
            self._want(decode)
            await asyncio.sleep(pause)
        while not self._held and not self._take_fairly(decode):
            self._want(decode)
            if loop.time() >= deadline:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._want_nothing()

    def _take_fairly(self, decode: bool) -> bool:
        return (decode or not self._somebody_wants(self._decode)) and self._take(1)

    def _take(self, most: int) -> bool:
        """Free cores, until `most` are held; whether any is held."""
        for core in self._cores:
            if len(self._held) < most and core not in self._held and core.lock():
                self._held.append(core)
        return bool(self._held)

    def _go_idle(self) -> None:
        self._give_back(keep=0)
        self._want_nothing()
        self._prefill_goes_on.unlock()

    def _give_back(self, *, keep: int) -> None:
        for core in self._held[keep:]:
            core.unlock()
        del self._held[keep:]

    def _before(self, decode: bool) -> tuple[_Lock, ...]:
        """The wishes that come before a step of this kind, or beside it."""
        return (self._decode,) if decode else (self._decode, self._prefill)

    def _want(self, decode: bool) -> None:
        kind = self._decode if decode else self._prefill
        if self._wanting is not kind:
            self._want_nothing()
            self._wanting = kind
        kind.share()

    def _want_nothing(self) -> None:
        if self._wanting is not None:
            self._wanting.unlock()
            self._wanting = None

    def _somebody_wants(self, *kinds: _Lock) -> bool:
        """Somebody else. Two who ask at once see each other: then a step has one core, where it could have had more."""
        return any(not kind.is_free() for kind in kinds if kind is not self._wanting)


class _Lock:
    """A file that is locked by one, or shared by several; of different openers, in one process or several."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)  # what is dropped holds no core

    def lock(self) -> bool:
        return self._try(fcntl.LOCK_EX)

    def share(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def is_free(self) -> bool:
        """Whether nobody else holds it; we must not hold it either."""
        if not self.lock():
            return False
        self.unlock()
        return True

    def close(self) -> None:
        """Idempotent."""
        self._close()

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
