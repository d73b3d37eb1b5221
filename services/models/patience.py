"""A store whose trouble is put up with for a while: the same question again, after longer and longer pauses with jitter.

Owns retrying, nothing else does it. What is missing or forbidden is not asked for again. Invariant: trouble ends in an answer, or
in `Trouble` at most `retry_s` seconds and one request later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from services.clock import Clock
from services.models.bucket import ObjectStore
from services.models.errors import Trouble
from services.telemetry.logs import AtMost

T = TypeVar("T")
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
_TELL_EVERY_S = 5.0


class PatientStore:
    """`warn` is told of trouble at most every 5 s, however many reads have it."""

    def __init__(self, store: ObjectStore, retry_s: float, clock: Clock, random: Random, warn: Callable[[str], None]) -> None:
        self._store = store
        self._retry_s = retry_s
        self._clock = clock
        self._random = random
        self._warn = warn
        self._may_tell = AtMost(clock.monotonic, _TELL_EVERY_S)

    @property
    def url(self) -> str:
        return self._store.url

    async def size(self, path: str) -> int:
        return await self._patiently(lambda: self._store.size(path))

    async def read(self, path: str, start: int, end: int) -> bytes:
        return await self._patiently(lambda: self._store.read(path, start, end))

    async def write(self, path: str, content: bytes | Path) -> None:
        await self._patiently(lambda: self._store.write(path, content))

    async def folders(self) -> list[str]:
        return await self._patiently(self._store.folders)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        began: float | None = None
        longest = FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except Trouble as error:
                now = self._clock.monotonic()
                began = now if began is None else began
                if now - began >= self._retry_s:
                    raise Trouble(f"{error}; asked again for {now - began:.0f} s") from None
                if self._may_tell() is not None:
                    self._warn(f"{error}; asking again")
            await asyncio.sleep(self._random.uniform(longest / 2, longest))
            longest = min(2 * longest, LONGEST_PAUSE_S)
