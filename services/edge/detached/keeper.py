"""The detached jobs that this edge holds: written each second, all in one transaction; their owners told each 10 s.

Owns the table of kept jobs and their leases. Invariants: an edge whose lease may have run out answers for the job no more, and
starts no attempt of it; a database that is slow or away costs the checkpoints of that time, never a token of a stream; what ended
stays here until the database has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from schemas.errors import StoreUnavailable
from services.bus.interface import Bus
from services.clock import Clock
from services.edge.detached.kept import Kept
from services.edge.detached.timing import DetachedTiming
from services.edge.gate.budgets import measure
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.supervisor import Supervisor
from services.edge.store.jobs import JobStore
from services.edge.store.records import Checkpoint, Standing
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

_log = logging.getLogger("headrace.edge")


def nothing(_: int) -> None:
    """Nobody waits for the end of the job here."""


class Keeper:
    def __init__(
        self, store: JobStore, supervisor: Supervisor, bus: Bus, clock: Clock, metrics: Metrics, timing: DetachedTiming
    ) -> None:
        self._store = store
        self._supervisor = supervisor
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._timing = timing
        self._kept: dict[str, Kept] = {}
        self._saving = asyncio.Lock()
        """One checkpoint at a time: an older one that came later would undo the newer one."""
        self._may_log = AtMost(clock.monotonic, 10.0)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, job: str) -> bool:
        return job in self._kept

    def live(self, job: str) -> ActiveJob | None:
        """The job, if it is surely ours now."""
        kept = self._kept.get(job)
        return kept.job if kept is not None and self._ours(kept) and not kept.job.given_up else None

    def behind(self) -> int:
        """Tokens that are not in the database yet."""
        return sum(kept.job.tokens.received() - sum(kept.written) for kept in list(self._kept.values()))

    def keep(self, job: ActiveJob, since: float, over: Callable[[int], None] = nothing) -> None:
        """A job whose row became ours after `since` (monotonic seconds). What it has is in the database. `over`: see `Kept`."""
        written = [len(choice.tokens) for choice in job.tokens.choices]
        ended = {index for index, choice in enumerate(job.tokens.choices) if choice.finish is not None}
        kept = self._kept[job.id] = Kept(job, since + self._timing.lease_s, self._clock.monotonic(), written, over, ended)
        job.held = partial(self._ours, kept)

    def forget(self, job: str) -> Kept | None:
        """It counts as if it had never been: nothing is written of it any more. None: it is not held here."""
        return self._kept.pop(job, None)

    def remember(self, kept: Kept) -> None:
        """It could not be forgotten."""
        self._kept[kept.job.id] = kept

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._timing.checkpoint_s)
            if self._bus.down_for() > self._timing.cut_off_s:
                await self.hand_over()
            elif self._kept:
                await self.checkpoint()

    async def watch(self) -> None:
        """Until cancelled. Apart from `run`, which may wait for the database."""
        while True:
            await asyncio.sleep(self._timing.watch_s)
            self.look()

    def look(self) -> None:
        """Let go of what may be another's by now; tell the owners of the rest that it is ours."""
        now = self._clock.monotonic()
        for kept in list(self._kept.values()):
            if kept.job.closed:
                continue
            if not self._ours(kept):
                _log.warning("a detached job is left to other edges: its lease ran out", extra=fields(job=kept.job.id))
                self._let_go(kept)
            elif now - kept.told_at >= self._timing.attach_s:
                kept.told_at = now
                self._supervisor.hold(kept.job)

    async def checkpoint(self) -> None:
        """Write what is new, renew every lease, hear what others want."""
        async with self._saving:
            if self._kept:
                await self._write(list(self._kept.values()))

    async def hand_over(self) -> None:
        """Write what is new and leave every job to other edges: at once, if the database can be told so.

        The jobs are let go first, so that nobody else has them while they are ours. What has ended stays until it is written.
        """
        async with self._saving:
            kept = list(self._kept.values())
            for one in kept:
                self._supervisor.let_go(one.job)
            if kept:
                await self._write(kept, release=True)
            for one in [one for one in self._kept.values() if one.job.given_up]:
                self._leave(one)

    def abandon(self) -> None:
        """Leave every job to other edges, which will find it when its lease runs out."""
        for kept in list(self._kept.values()):
            self._let_go(kept)

    async def _write(self, kept: Sequence[Kept], *, release: bool = False) -> None:
        began = self._clock.monotonic()
        pending = [(one, one.checkpoint(release=release)) for one in kept]
        try:
            done = await self._store.checkpoint(self._bus.process, [written for _, written in pending], self._timing.lease_s)
        except StoreUnavailable as error:
            self._metrics.store_failures.add(1, {"operation": "checkpoint"})
            if self._may_log() is not None:
                _log.warning("the database cannot be written", extra=fields(error=error.__cause__ or error, jobs=len(pending)))
            return
        self._metrics.store_checkpoint_time.record(self._clock.monotonic() - began)
        for entry in done.booked:
            measure(self._metrics, entry)
        for one, written in pending:
            self._settle(one, written, done.standings[written.job], began)

    def _settle(self, kept: Kept, written: Checkpoint, standing: Standing, began: float) -> None:
        job = kept.job
        if self._kept.get(job.id) is not kept:
            return  # let go while the database was slow
        if standing is Standing.TAKEN:
            self._let_go(kept)
            return
        if standing is Standing.DELETED:
            self._leave(kept)
            self._supervisor.cancel(job)
            return
        kept.saved(written, began + self._timing.lease_s)
        if written.end is not None:
            self._leave(kept)
        elif standing is Standing.CANCEL:
            self._supervisor.cancel(job)

    def _ours(self, kept: Kept) -> bool:
        return self._clock.monotonic() < kept.valid_until

    def _let_go(self, kept: Kept) -> None:
        self._leave(kept)
        self._supervisor.let_go(kept.job)

    def _leave(self, kept: Kept) -> None:
        del self._kept[kept.job.id]
        kept.over(kept.used_tokens)
