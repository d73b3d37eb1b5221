"""The queue where jobs wait for credit: what the edge puts and routers pull. Two implementations stand behind it,
`jetstream_queue.JetStreamWorkQueue` and `memory_queue.MemoryWorkQueue`.

One subject holds at most one job, so putting a job twice is putting it once. Invariant: a job leaves the queue by `ack`,
`purge` or its TTL only; one that was pulled and neither acked nor naked comes back after `ack_wait`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

ACK_WAIT_S = 5.0
"""Longer than a router needs to place a job, shorter than a client's patience when that router dies."""
MAX_JOBS = 100_000


class Put(StrEnum):
    """What became of a `put`. DUPLICATE is success: the job is in the queue, or was within the last two minutes."""

    QUEUED = "queued"
    FULL = "full"
    DUPLICATE = "duplicate"


class Item(Protocol):
    """One pulled job. Exactly one of `ack` and `nak` ends it."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def ack(self) -> None:
        """The job is someone's now; the queue forgets it. Raises `BusUnavailable`: it may come back."""
        ...

    async def nak(self) -> None:
        """Nobody took it: it is at once the first of its lane again. Raises `BusUnavailable`: back after `ack_wait`."""
        ...


class WorkQueue(Protocol):
    """Every method raises `BusUnavailable` within its deadline when the queue cannot be reached."""

    async def ensure(self) -> None:
        """Make the queue exist, with its present configuration. Routers call it; repeating it is harmless."""
        ...

    async def put(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        ttl_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Put:
        """Add one job for at least `ttl_s` seconds. Also raises `MessageTooLarge`.

        After `BusUnavailable` the queue may hold it all the same, after `NobodyListens` it does not.
        """
        ...

    async def waiting(self, subject_filter: str) -> dict[str, int]:
        """How many jobs each subject under `subject_filter` holds, pulled and unfinished ones included."""
        ...

    async def pull(self, subject_filter: str, durable: str) -> Item | None:
        """The first job under `subject_filter`, or None. `durable` names the filter for all routers alike.

        Filters of two durables must not overlap.
        """
        ...

    async def purge(self, subject: str) -> bool:
        """Remove what `subject` holds, pulled or not. True when there was something."""
        ...
