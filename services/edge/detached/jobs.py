"""Detached jobs as the rest of the edge uses them: submit, read, cancel, delete. Background responses stand on this.

Owns the tasks behind them. Invariant: a job is submitted only after its row was written, so that an accepted job is never lost;
while the database cannot be used, new detached jobs are refused, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from random import Random

from schemas.errors import EdgeFull, HeadraceError, InvalidRequest, StoreUnavailable, UnsupportedParameter
from schemas.identity import job_id
from schemas.state import Death
from schemas.subjects import Subjects
from services.bus.interface import Bus, Subscription
from services.bus.typed import Refusals, listen
from services.clock import Clock
from services.edge.detached.adoption import Adoption
from services.edge.detached.keeper import Keeper, nothing
from services.edge.detached.reader import DetachedReader, gone, unknown
from services.edge.detached.request import pack, unpack
from services.edge.detached.timing import DetachedTiming
from services.edge.gate.records import Bill
from services.edge.jobs.draft import Draft
from services.edge.jobs.explained import Explain
from services.edge.jobs.handle import admitted
from services.edge.jobs.supervisor import Supervisor
from services.edge.store.jobs import JobStore
from services.edge.store.records import JobState, Retention, StoredJob
from services.telemetry import names
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

_ASKS = 60
"""How often a database that cannot be used is told of a cancel before that is given up."""
_log = logging.getLogger("headrace.edge")


class DetachedJobs:
    """`prepare` makes the database ready; it is tried until it succeeds, and again when the database failed.

    `most`: jobs that this edge holds at once.
    """

    def __init__(
        self,
        store: JobStore,
        prepare: Callable[[], Awaitable[None]],
        supervisor: Supervisor,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        *,
        most: int = 1024,
        retention: Retention | None = None,
        timing: DetachedTiming | None = None,
    ) -> None:
        self._store = store
        self._prepare = prepare
        self._supervisor = supervisor
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._most = most
        self._retention = retention or Retention()
        self._timing = timing or DetachedTiming()
        self._keeper = Keeper(store, supervisor, bus, clock, metrics, self._timing)
        self._adoption = Adoption(store, self._keeper, supervisor, bus, clock, random, metrics, self._timing, most)
        self._refusals = Refusals(metrics, clock)
        self._subscription: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._may_log = AtMost(clock.monotonic, 10.0)
        self._ready = False
        metrics.gauge(names.DETACHED_JOBS, lambda: float(len(self._keeper)))
        metrics.gauge(names.STORE_BEHIND, self._keeper.behind)

    def __len__(self) -> int:
        """Jobs that this edge holds."""
        return len(self._keeper)

    @property
    def adopts(self) -> bool:
        """Whether it takes over what other edges leave; not while it drains."""
        return self._adoption.on

    @adopts.setter
    def adopts(self, on: bool) -> None:
        self._adoption.on = on

    @property
    def ready(self) -> bool:
        """The database was reached, and its tables are up to date."""
        return self._ready

    async def open(self) -> None:
        """Begin to hold and to adopt, as soon as the database can be used. Raises `Disconnected`."""
        self._subscription = await listen(
            self._bus, self._subjects.dead_any(), Death, self._adoption.on_death, refusals=self._refusals
        )
        self._supervisor.held.on_unheld = self._end_unheld
        self._tasks = [asyncio.create_task(self._run())]

    async def close(self) -> None:
        """Leave every job to other edges. No job is cancelled."""
        tasks = [*self._tasks, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keeper.hand_over()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    # jobs

    async def submit(self, draft: Draft, tenant: str, bill: Bill | None = None, over: Callable[[int], None] = nothing) -> str:
        """The id of a job that goes on whoever listens. Raises the `HeadraceError` that refused it; `StoreUnavailable`.

        What it uses is booked with the end of its row, whichever edge writes that, by `bill` (None: the tenant's, without a
        price). `over` is called with the tokens that it used, as far as is known here, once it is held here no more; not when it
        was refused. What the engine says of the prompt (`prompt_logprobs`) is not kept, so it cannot be asked for.
        """
        if draft.sampling.prompt_logprobs is not None:
            raise UnsupportedParameter("Background requests have no 'prompt_logprobs'.", param="prompt_logprobs")
        if not self._ready:
            raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)
        if len(self._keeper) >= self._most:
            raise EdgeFull("Too many background requests are running.", retry_after=1.0)
        self._supervisor.refuse_quarantined(draft)
        draft = replace(draft, explain=Explain.NOTHING)  # nobody is told, so nobody waits for it
        job, since = job_id(self._random), self._clock.monotonic()
        bill = bill or Bill(model=draft.model, prompt_tokens=draft.prompt_tokens)
        await self._store.create(job, tenant, pack(draft), self._bus.process, self._timing.lease_s, bill)
        try:
            active = self._supervisor.start_detached(job, draft)
            self._keeper.keep(active, since, over)
            await admitted(active)
        except HeadraceError:
            await self.undo(job, tenant)
            raise
        return job

    async def undo(self, job: str, tenant: str) -> None:
        """A job that was submitted here a moment ago stops, leaves nothing behind, and is not booked.

        If the database cannot be told now, it is kept there as ended, with what it used.
        """
        kept = self._keeper.forget(job)
        if kept is not None:
            self._supervisor.cancel(kept.job)
        try:
            await self._store.delete(job, tenant, booked=False)
        except StoreUnavailable:
            self._metrics.store_failures.add(1, {"operation": "delete"})
            if kept is not None:
                self._keeper.remember(kept)

    async def attach(self, job: str, tenant: str, first: Mapping[int, int] | None = None) -> DetachedReader:
        """Read the job from these token indexes on (by choice; 0 where none is given), now or later, here or anywhere.

        Raises `NotFound` (also for another tenant's), `Gone`, `StoreUnavailable`, `InvalidRequest` for an index that cannot be;
        `UnreadableMessage` for a job of a version that this process cannot read.
        """
        row = await self.find(job, tenant)
        if row.state is JobState.EXPIRED:
            raise gone()
        asked = dict(first or {})
        draft = unpack(row.request)
        choices = range(draft.n)
        if any(choice not in choices or index < 0 for choice, index in asked.items()):
            raise InvalidRequest("There is no such position in the answer.")
        begin = {choice: asked.get(choice, 0) for choice in choices}
        return DetachedReader(job, draft, begin, self._keeper, self._store, self._timing.poll_s)

    async def find(self, job: str, tenant: str) -> StoredJob:
        """How it stands. Raises `NotFound`, `StoreUnavailable`."""
        row = await self._store.get(job, tenant)
        if row is None:
            raise unknown()
        return row

    async def cancel(self, job: str, tenant: str) -> None:
        """Stop it, wherever it is held: within a checkpoint. Raises `NotFound`, `StoreUnavailable`."""
        if not await self._store.ask_cancel(job, tenant):
            await self.find(job, tenant)  # one that has ended needs nothing
        elif job in self._keeper:
            await self._keeper.checkpoint()

    async def delete(self, job: str, tenant: str) -> None:
        """Stop it, book what it used, and forget all of it. Raises `NotFound`, `StoreUnavailable`."""
        if job in self._keeper:
            await self._keeper.checkpoint()
        if not await self._store.delete(job, tenant):
            raise unknown()
        if job in self._keeper:
            await self._keeper.checkpoint()

    # inside

    async def _run(self) -> None:
        await self._make_ready()
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._keeper.run(), self._keeper.watch(), self._adoption.run(), self._sweep()):
                    group.create_task(work)
        except ExceptionGroup:
            _log.exception("detached jobs are left to other edges")
            self._ready = False
            self._keeper.abandon()

    def _end_unheld(self, job: str) -> None:
        """An operator ended a job that may have no edge just now: who adopts it finds that in its row."""
        task = asyncio.create_task(self._ask_cancel(job))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ask_cancel(self, job: str) -> None:
        for _ in range(_ASKS):
            try:
                await self._store.ask_cancel(job, None)
                return
            except StoreUnavailable:
                self._metrics.store_failures.add(1, {"operation": "cancel"})
            await asyncio.sleep(self._timing.adopt_s)
        _log.warning("an operator's cancel could not be written", extra=fields(job=job))

    async def _make_ready(self) -> None:
        self._ready = False
        while not self._ready:
            try:
                await self._prepare()
                self._ready = True
            except StoreUnavailable as error:
                self._metrics.store_failures.add(1, {"operation": "open"})
                if self._may_log() is not None:
                    _log.warning("no detached jobs: the database cannot be used", extra=fields(error=error.__cause__ or error))
                await asyncio.sleep(self._timing.adopt_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._timing.sweep_s)
            try:
                await self._store.sweep(self._retention)
            except StoreUnavailable as error:
                self._metrics.store_failures.add(1, {"operation": "sweep"})
                _log.debug("nothing swept: %s", error)
                await self._make_ready()  # the tables may be gone with their file
