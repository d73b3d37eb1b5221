"""The work queue in memory, for tests and simulations: same promises, time from the clock that is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import BusUnavailable, NobodyListens
from services.bus.interface import NO_HEADERS
from services.bus.matching import matches
from services.bus.work_queue import ACK_WAIT_S, MAX_JOBS, Put
from services.clock import Clock, SystemClock

_DUPLICATE_WINDOW_S = 120.0


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    expires: float
    leased_until: float = float("-inf")


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """A pulled job; `_lease` tells a late nak from the present holder's."""

    _queue: MemoryWorkQueue
    _entry: _Entry
    _lease: float

    @property
    def subject(self) -> str:
        return self._entry.subject

    @property
    def data(self) -> bytes:
        return self._entry.data

    @property
    def headers(self) -> Mapping[str, str]:
        return self._entry.headers

    async def ack(self) -> None:
        self._queue.forget(self._entry)

    async def nak(self) -> None:
        self._queue.give_back(self._entry, self._lease)


class MemoryWorkQueue:
    """`WorkQueue` in memory, one object for all who share it.

    While `down`, every call raises `BusUnavailable`; while `leaderless`, `NobodyListens`.
    """

    def __init__(self, *, clock: Clock | None = None, max_jobs: int = MAX_JOBS, ack_wait_s: float = ACK_WAIT_S) -> None:
        self.down = self.leaderless = False
        self._clock = clock or SystemClock()
        self._max_jobs = max_jobs
        self._ack_wait_s = ack_wait_s
        self._sequence = 0
        self._jobs: dict[str, _Entry] = {}
        self._seen: dict[str, float] = {}

    async def ensure(self) -> None:
        self._now()

    async def put(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        ttl_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Put:
        now = self._now()
        self._seen = {seen: when for seen, when in self._seen.items() if when > now - _DUPLICATE_WINDOW_S}
        if subject in self._jobs or msg_id in self._seen:
            return Put.DUPLICATE
        if len(self._jobs) >= self._max_jobs:
            return Put.FULL
        self._sequence += 1
        self._seen[msg_id] = now
        self._jobs[subject] = _Entry(self._sequence, subject, data, headers or NO_HEADERS, now + max(1.0, ttl_s))
        return Put.QUEUED

    async def waiting(self, subject_filter: str) -> dict[str, int]:
        self._now()
        return {subject: 1 for subject in self._jobs if matches(subject_filter, subject)}

    async def pull(self, subject_filter: str, durable: str) -> MemoryItem | None:
        now = self._now()
        free = [entry for entry in self._jobs.values() if entry.leased_until <= now and matches(subject_filter, entry.subject)]
        if not free:
            return None
        first = min(free, key=lambda entry: entry.sequence)
        first.leased_until = now + self._ack_wait_s
        return MemoryItem(self, first, first.leased_until)

    async def purge(self, subject: str) -> bool:
        self._now()
        return self._jobs.pop(subject, None) is not None

    def __contains__(self, subject: str) -> bool:
        return subject in self._jobs

    def lose_everything(self) -> None:
        """As a server does that restarts: no jobs, and no memory of those that were."""
        self._jobs.clear()
        self._seen.clear()

    def forget(self, entry: _Entry) -> None:
        self._now()
        if self._jobs.get(entry.subject) is entry:
            del self._jobs[entry.subject]

    def give_back(self, entry: _Entry, lease: float) -> None:
        self._now()
        if entry.leased_until == lease:
            entry.leased_until = float("-inf")

    def _now(self) -> float:
        """The time, after what expired is gone. Raises as the class says."""
        if self.leaderless:
            raise NobodyListens("JetStream has no leader")
        if self.down:
            raise BusUnavailable("JetStream is down")
        now = self._clock.monotonic()
        for entry in [entry for entry in self._jobs.values() if entry.expires <= now]:
            del self._jobs[entry.subject]
        return now
