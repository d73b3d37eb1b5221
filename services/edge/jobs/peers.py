"""Which processes this edge hears, when it heard each of them last, and which are known to be gone.

Owns these times. Invariant: a process that is gone stays gone, whatever it said comes late.
Knows no jobs: a worker that has nothing of ours says nothing to us, so who should be heard is not said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.state import Cause
from services.clock import Clock

_FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Word:
    """Something `process` said `at` (monotonic seconds), after that many digests."""

    process: str
    at: float
    digests: int


class Peers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, Word] = {}
        self._routers: dict[str, float] = {}
        self._gone: dict[str, tuple[float, Cause]] = {}

    def worker(self, process: str, *, digest: bool = False) -> Word:
        """A worker spoke to us."""
        last = self._workers.get(process)
        word = self._workers[process] = Word(process, self._clock.monotonic(), (last.digests if last else 0) + digest)
        return word

    def router(self, process: str) -> None:
        """A router spoke to everybody."""
        self._routers[process] = self._clock.monotonic()

    def gone(self, process: str, cause: Cause) -> None:
        """It is dead, or left: its silence says nothing about the bus."""
        self._gone.setdefault(process, (self._clock.monotonic(), cause))
        self._workers.pop(process, None)
        self._routers.pop(process, None)

    def cause(self, process: str) -> Cause | None:
        """Why it is gone; None while it is not."""
        return self._gone[process][1] if process in self._gone else None

    def last(self, worker: str) -> Word | None:
        return self._workers.get(worker)

    def heard(self, workers: set[str]) -> list[float]:
        """When each router, and each of `workers`, was heard last."""
        return [*self._routers.values(), *(word.at for process, word in self._workers.items() if process in workers)]

    def forget_old(self) -> None:
        """Bounds memory; call it now and then."""
        oldest = self._clock.monotonic() - _FORGET_S
        self._workers = {process: word for process, word in self._workers.items() if word.at > oldest}
        self._routers = {process: at for process, at in self._routers.items() if at > oldest}
        self._gone = {process: known for process, known in self._gone.items() if known[0] > oldest}
