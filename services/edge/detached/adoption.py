"""Takes the detached jobs that no edge holds any more, and goes on with them.

Owns what is known of dead edges. Invariant: who takes a job is decided by the database alone; two edges that want it do not both
get it. Nothing is taken while NATS cannot be reached: it could not be computed.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

from schemas.errors import StoreUnavailable, UnreadableMessage
from schemas.state import Cause, Death
from services.bus.interface import Bus, Msg
from services.clock import Clock
from services.edge.detached.keeper import Keeper
from services.edge.detached.request import inherit
from services.edge.detached.timing import DetachedTiming
from services.edge.jobs.supervisor import Supervisor
from services.edge.store.jobs import JobStore
from services.edge.store.records import Checkpoint, End, JobState, StoredJob
from services.telemetry.logs import fields
from services.telemetry.metrics import Metrics

MOST = 64
"""At once, so that the jobs of a dead edge are spread over the others."""
_REMEMBER_S = 60.0
_log = logging.getLogger("headrace.edge")


class Adoption:
    """`most`: how many jobs this edge holds at all."""

    def __init__(
        self,
        store: JobStore,
        keeper: Keeper,
        supervisor: Supervisor,
        bus: Bus,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        timing: DetachedTiming,
        most: int,
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._supervisor = supervisor
        self._bus = bus
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._timing = timing
        self._most = most
        self.on = True
        self._dead: dict[str, float] = {}
        self._wake = asyncio.Event()

    def on_death(self, death: Death, _: Msg) -> None:
        """Of any process; those of edges matter. One that only lost its connection may come back."""
        if death.cause is not Cause.DISCONNECTED and death.process != self._bus.process:
            oldest = self._clock.monotonic() - _REMEMBER_S
            self._dead = {process: at for process, at in self._dead.items() if at > oldest}
            self._dead[death.process] = self._clock.monotonic()
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            await self.look()
            try:
                async with asyncio.timeout(self._random.uniform(0.5, 1.5) * self._timing.adopt_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Adopt what can be adopted now."""
        room = min(MOST, self._most - len(self._keeper))
        if not self.on or not self._bus.connected or room <= 0:
            return
        since = self._clock.monotonic()
        try:
            rows = await self._store.adopt(self._bus.process, self._dead.keys(), self._timing.lease_s, room)
        except StoreUnavailable as error:
            self._metrics.store_failures.add(1, {"operation": "adopt"})
            _log.debug("no jobs adopted: %s", error)
            return
        for row in rows:
            if row.job not in self._keeper:  # else it is ours, has ended, and could not be written for a while
                await self._take(row, since)

    async def _take(self, row: StoredJob, since: float) -> None:
        try:
            inherited = inherit(row)
        except UnreadableMessage as error:
            _log.error("the row of a detached job cannot be read", extra=fields(job=row.job, error=error))
            await self._bury(row)
            return
        self._metrics.detached_adopted.add(1)
        self._keeper.keep(self._supervisor.take_over(inherited), since)

    async def _bury(self, row: StoredJob) -> None:
        end = End(JobState.FAILED, "internal_error", "Internal error.")
        try:
            await self._store.checkpoint(self._bus.process, [Checkpoint(row.job, row.facts, end=end)], self._timing.lease_s)
        except StoreUnavailable:
            self._metrics.store_failures.add(1, {"operation": "checkpoint"})  # it lapses, and is found again
