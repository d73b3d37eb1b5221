"""The database of a simulated cluster: a `JobStore` in memory, and how one process reaches it: not in no time, and not always."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from schemas.errors import StoreUnavailable
from services.edge.gate.records import Bill
from services.edge.store.jobs import ATTEMPTS
from services.edge.store.records import (
    Checkpoint,
    Chunk,
    Facts,
    JobState,
    Positions,
    Progress,
    Retention,
    Standing,
    StoredJob,
    Swept,
    Written,
)

GIVE_UP_S = 5.0
R = TypeVar("R")


@dataclass(slots=True)
class Row:
    tenant: str
    request: bytes
    created: float
    edge: str
    lease_until: float
    state: JobState = JobState.RUNNING
    facts: Facts = field(default_factory=Facts)
    cancel: bool = False
    error: tuple[str, str] = ("", "")
    chunks: dict[tuple[int, int], Chunk] = field(default_factory=dict)


class Rows:
    """What all edges share. `down`: nobody reaches it; `forgetful`: how often an answer is lost though its work was done."""

    def __init__(self, now: Callable[[], float], random: Random) -> None:
        self.rows: dict[str, Row] = {}
        self.down = False
        self.forgetful = 0.0
        self.now = now
        self.random = random


class ReachedStore:
    """A `JobStore` for one process."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def create(self, job: str, tenant: str, request: bytes, edge: str, lease_s: float, bill: Bill | None = None) -> None:
        def work() -> None:
            now = self._rows.now()
            self._rows.rows[job] = Row(tenant, request, now, edge, now + lease_s)

        await self._do(work)

    async def checkpoint(self, edge: str, checkpoints: Sequence[Checkpoint], lease_s: float) -> Written:
        return await self._do(lambda: Written({one.job: self._write(edge, one, lease_s) for one in checkpoints}))

    async def adopt(self, edge: str, dead: Collection[str], lease_s: float, most: int) -> list[StoredJob]:
        def work() -> list[StoredJob]:
            now, taken = self._rows.now(), []
            for job, row in self._rows.rows.items():
                if row.state is JobState.RUNNING and (row.lease_until < now or row.edge in dead) and len(taken) < most:
                    row.edge, row.lease_until = edge, now + lease_s
                    row.facts = replace(row.facts, claimed=row.facts.claimed + ATTEMPTS)
                    taken.append(self._stored(job, row))
            return taken

        return await self._do(work)

    async def get(self, job: str, tenant: str) -> StoredJob | None:
        row = await self._do(lambda: self._rows.rows.get(job))
        return self._stored(job, row) if row is not None and row.tenant == tenant else None

    async def read(self, job: str, positions: Positions) -> Progress | None:
        def work() -> Progress | None:
            row = self._rows.rows.get(job)
            if row is None:
                return None
            chunks = (chunk for _, chunk in sorted(row.chunks.items()))
            beyond = tuple(c for c in chunks if c.choice in positions and c.first + c.count >= positions[c.choice])
            return Progress(row.state, beyond, row.facts.cached_tokens, row.facts.compute_s, *row.error)

        return await self._do(work)

    async def ask_cancel(self, job: str, tenant: str | None) -> bool:
        def work() -> bool:
            row = self._rows.rows.get(job)
            if row is None or row.state is not JobState.RUNNING:
                return False
            row.cancel = True
            return True

        return await self._do(work)

    async def delete(self, job: str, tenant: str, *, booked: bool = True) -> bool:
        return await self._do(lambda: self._rows.rows.pop(job, None) is not None)

    async def sweep(self, retention: Retention) -> Swept:
        return Swept()

    def _write(self, edge: str, one: Checkpoint, lease_s: float) -> Standing:
        row = self._rows.rows.get(one.job)
        if row is None:
            return Standing.DELETED
        if row.edge != edge:
            return Standing.TAKEN
        row.lease_until = self._rows.now() + (-1.0 if one.release else lease_s)
        row.facts = one.facts
        if one.end is not None and row.state is JobState.RUNNING:
            row.state, row.error = one.end.state, (one.end.code, one.end.message)
        for chunk in one.chunks:
            for choice, first in [key for key in row.chunks if key[0] == chunk.choice and key[1] >= chunk.first]:
                del row.chunks[choice, first]
            row.chunks[chunk.choice, chunk.first] = chunk
        return Standing.CANCEL if row.cancel else Standing.HELD

    def _stored(self, job: str, row: Row) -> StoredJob:
        chunks = tuple(chunk for _, chunk in sorted(row.chunks.items()))
        age = self._rows.now() - row.created
        return StoredJob(job, row.state, row.request, age, row.edge, row.facts, chunks)

    async def _do(self, work: Callable[[], R]) -> R:
        await self._there()
        done = work()
        await self._there()
        if self._rows.random.random() < self._rows.forgetful:
            raise StoreUnavailable("the answer was lost")
        return done

    async def _there(self) -> None:
        if self._rows.down:
            await asyncio.sleep(GIVE_UP_S)
            raise StoreUnavailable("no answer")
        await asyncio.sleep(self._rows.random.uniform(0.0005, 0.02))
