"""One placement of one job: choose, reserve on decode, submit to prefill, and the next best when a worker does not take it.

Owns the reservation until prefill accepts; after that prefill renews and releases it. Must not know how a job came (request or
queue) or what happens when nobody takes it. Invariants: an answer within the budget; no reservation is kept for work that
this router gave up. A submit whose answer was lost may run all the same: the edge cancels runs that it did not adopt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from schemas.codec import Message
from schemas.errors import (
    BusError,
    Disconnected,
    HeadraceError,
    MessageTooLarge,
    ModelLoading,
    NoResponders,
    Unavailable,
    UnreadableMessage,
)
from schemas.identity import run_id
from schemas.job import Job
from schemas.placement import (
    Accept,
    Accepted,
    Lease,
    LeaseAnswer,
    LeaseItem,
    LeaseVerb,
    Placement,
    Queue,
    Refuse,
    Refused,
    WorkerAnswer,
)
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import ask, send
from services.router.admission import Left, late, presses, too_late
from services.router.cancelled import CancelledJobs
from services.router.entry import refused
from services.router.placement import Impossible, Local, NoCredit, Pair, Why, place
from services.router.placement_request import Request
from services.router.placement_workers import Pool
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.view import Charge, View

UNHURRIED = Left()
ASK_S = 0.1
"""One worker's share of the budget: a silent one leaves time for the next best."""
OWN_ERRORS = frozenset({"internal_error", "job_failed", "refused"})
"""Refusals that say that something is wrong with a worker, not that it is full."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker took it. `why`: the terms of the choice."""

    answer: Accepted
    why: Why


@dataclass(frozen=True, slots=True)
class _NotTaken:
    """`worker` refused, or did not answer."""

    worker: str


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Places jobs on the workers of `view`. Any number of placements run at once."""

    bus: Bus
    subjects: Subjects
    view: View
    index: PrefixIndex
    cancelled: CancelledJobs
    random: Random

    async def place(self, job: Job, within: float, patience: float = 0.0, left: Left = UNHURRIED) -> Placed | Queue | Refused:
        """Placed, Queue (nobody takes it now) or Refused (nobody ever will, or not in time), within so many seconds.

        `patience`: seconds that the job may wait in the queue for a worker that is better than those with credit.
        `left`: until its deadlines.
        """
        by, prompt = asyncio.get_running_loop().time() + within, Prompt(job)
        without = frozenset[str]()
        while _left(by) > 0:
            if job in self.cancelled:
                return Refused(code=Unavailable.code or "", reason="cancelled")
            pools = self.view.pools(job.model)
            request = Request.of(job, prompt.hits(self.index, pools), patience)
            decision = place(pools, request, self.view.now(), self.random, without)
            match decision:
                case NoCredit(reason=reason):
                    return Queue(router=self.bus.process, reason=reason)
                case Impossible(error=ModelLoading()) if self.view.served_lately(job.model):
                    return Queue(router=self.bus.process, reason="no_worker")
                case Impossible(error=error):
                    return refusal(error)
            assert decision.why is not None
            if not job.resume:
                away = too_late(decision.why, left)
                if away is not None:
                    return refused(away)
                if late(decision.why, left) or presses(job.tier, decision.why):
                    return Queue(router=self.bus.process, reason="late" if late(decision.why, left) else "kv_pressure")
            self._expect(prompt, pools, decision)
            try:
                outcome = await self._try(job, decision, by)
            except MessageTooLarge as error:
                return refusal(error)
            if isinstance(outcome, Accepted):
                return Placed(outcome, decision.why)
            without |= {outcome.worker}
        return Queue(router=self.bus.process, reason="no_answer")

    def _expect(self, prompt: Prompt, pools: Collection[Pool], decision: Pair | Local) -> None:
        """What was just placed counts as cached at once: its siblings come in a burst."""
        pool = next(pool for pool in pools if decision.decode in pool)
        blocks = tuple(prompt.chain(pool.kv_compat, pool.block_tokens))
        if isinstance(decision, Pair):
            self.index.expect(decision.prefill, blocks, self.view.now())
        self.index.expect(decision.decode, blocks, self.view.now())

    async def _try(self, job: Job, decision: Pair | Local, by: float) -> Accepted | _NotTaken:
        # A run of its own for each try: the one whose answer was lost may be running.
        run = run_id(self.random)
        if isinstance(decision, Pair):
            return await self._on_pair(run, job, decision, by)
        charge = self.view.charge(decision.decode, prefill_tokens=decision.uncached, slots=1, blocks=decision.blocks)
        if await self._submit(self.subjects.decode_submit(decision.decode), Placement(run=run, job=job), charge, by):
            return Accepted(run=run, prefill="", decode=decision.decode, router=self.bus.process)
        return _NotTaken(decision.decode)

    async def _on_pair(self, run: int, job: Job, pair: Pair, by: float) -> Accepted | _NotTaken:
        if not await self._reserve(run, job, pair, by):
            return _NotTaken(pair.decode)
        taken = False
        try:
            if job not in self.cancelled:
                charge = self.view.charge(pair.prefill, prefill_tokens=pair.uncached)
                placement = Placement(run=run, job=job, decode=pair.decode, fetch=pair.fetch)
                taken = await self._submit(self.subjects.prefill_submit(pair.prefill), placement, charge, by)
        finally:
            if not taken:
                self._release(run, pair)
        if taken:
            return Accepted(run=run, prefill=pair.prefill, decode=pair.decode, router=self.bus.process)
        return _NotTaken(pair.prefill)

    async def _reserve(self, run: int, job: Job, pair: Pair, by: float) -> bool:
        suspect = job.job if job.suspect else ""
        item = LeaseItem(run=run, verb=LeaseVerb.RESERVE, blocks=pair.blocks, suspect=suspect)
        lease = Lease(process=self.bus.process, items=(item,))
        charge = self.view.charge(pair.decode, slots=1, blocks=pair.blocks)
        answer: LeaseAnswer | None = await self._ask(self.subjects.decode_lease(pair.decode), lease, LeaseAnswer, charge, by)
        if answer is None:
            self._release(run, pair)  # the answer may have been lost, not the request
            return False
        return any(result.run == run and result.ok for result in answer.results)

    async def _submit(self, subject: str, placement: Placement, charge: Charge, by: float) -> bool:
        answer = await self._ask(subject, placement, WorkerAnswer, charge, by)
        return isinstance(answer, Accept) and answer.run == placement.run

    async def _ask(self, subject: str, message: Message, kind: Any, charge: Charge, by: float) -> Any:
        """The answer, its credits learnt; None when there is none in time. Raises `MessageTooLarge`."""
        answer, heard, ours = None, True, False
        try:
            answer = await ask(self.bus, subject, message, kind, timeout=max(0.0, min(ASK_S, _left(by))))
        except (NoResponders, Disconnected, MessageTooLarge) as error:
            heard, ours = False, not isinstance(error, NoResponders)
            if isinstance(error, MessageTooLarge):
                raise
        except (BusError, UnreadableMessage):
            return None
        finally:
            if answer is not None:
                ok = not (isinstance(answer, Refuse) and answer.reason in OWN_ERRORS)
                self.view.settle(charge, answer.credits, ok=ok)
            elif heard:
                self.view.lose(charge)
            else:
                self.view.undo(charge, ok=ours)
        return answer

    def _release(self, run: int, pair: Pair) -> None:
        lease = Lease(process=self.bus.process, items=(LeaseItem(run=run, verb=LeaseVerb.RELEASE),))
        try:
            send(self.bus, self.subjects.decode_lease(pair.decode), lease)
        except BusError:
            return  # the lease runs out by itself
        self.view.give_back(pair.decode, slots=1, blocks=pair.blocks)


def refusal(error: HeadraceError) -> Refused:
    """`error` as the edge hears it."""
    return Refused(code=error.code or "internal_error", reason=error.message, retry_after=error.retry_after)


def _left(by: float) -> float:
    return by - asyncio.get_running_loop().time()
