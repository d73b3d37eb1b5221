"""One placement of one job: choose, reserve on decode, submit to prefill, and the next best when a worker does not take it.

Owns the reservation until prefill accepts; after that prefill renews and releases it. Must not know how a job came (request or
queue) or what happens when nobody takes it. Invariants: an answer within the budget; no reservation is kept for work that
this router gave up. A submit whose answer was lost may run all the same: the edge cancels runs that it did not adopt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any

from schemas.codec import Message
from schemas.errors import (
    BusError,
    Disconnected,
    MessageTooLarge,
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
    SubmitAnswer,
    WorkerAnswer,
)
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import ask, send
from services.router.admission import Left, Stays
from services.router.cancelled import CancelledJobs
from services.router.chains import Chains
from services.router.choice import choose, refusal
from services.router.estimate import Charge
from services.router.placement import Local, Pair, Why
from services.router.placement_request import Request
from services.router.placement_workers import Pool
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.view import View

UNHURRIED = Left()
ASK_S = 0.1
"""One worker's share of the budget: a silent one leaves time for the next best."""
NO_ANSWER = "no_answer"
OWN_ERRORS = frozenset({"internal_error", "job_failed", "refused"})
"""Refusals that say that something is wrong with a worker, not that it is full."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    """`worker` refused with `reason`, or did not answer."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`answer`: Accepted by a worker, Queue (nobody takes it now) or Refused (nobody ever will, or not in time).

    `why`: the terms of the last choice; `tried`: who was asked before and did not take it.
    """

    answer: SubmitAnswer
    why: Why | None = None
    tried: tuple[NotTaken, ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Places jobs on the workers of `view`. Any number of placements run at once."""

    bus: Bus
    subjects: Subjects
    view: View
    index: PrefixIndex
    cancelled: CancelledJobs
    random: Random
    chains: Chains = field(default_factory=Chains)

    async def place(self, job: Job, within: float, patience: float = 0.0, left: Left = UNHURRIED) -> Outcome:
        """What became of it, within so many seconds.

        `patience`: seconds that the job may wait in the queue for a worker that is better than those with credit.
        `left`: until its deadlines.
        """
        by, prompt = asyncio.get_running_loop().time() + within, Prompt(job, self.chains)
        why, tried = None, tuple[NotTaken, ...]()
        while _left(by) > 0:
            if job in self.cancelled:
                return Outcome(Refused(code=Unavailable.code or "", reason="cancelled"), why, tried)
            pools = self.view.pools(job.model)
            request = Request.of(job, prompt.hits(self.index, pools), patience)
            choice = choose(self.view, pools, job, request, left, self.random, {one.worker for one in tried})
            why = choice.why
            match choice.instead:
                case Stays(reason=reason):
                    return Outcome(Queue(router=self.bus.process, reason=reason), why, tried)
                case Refused() as refused:
                    return Outcome(refused, why, tried)
            assert choice.chosen is not None
            self._expect(prompt, pools, choice.chosen)
            try:
                outcome = await self._try(job, choice.chosen, by)
            except MessageTooLarge as error:
                return Outcome(refusal(error), why, tried)
            if isinstance(outcome, Accepted):
                return Outcome(outcome, why, tried)
            tried += (outcome,)
        return Outcome(Queue(router=self.bus.process, reason="no_answer"), why, tried)

    def _expect(self, prompt: Prompt, pools: Collection[Pool], decision: Pair | Local) -> None:
        """What was just placed counts as cached at once: its siblings come in a burst."""
        pool = next(pool for pool in pools if decision.decode in pool)
        blocks = tuple(prompt.chain(pool.kv_compat, pool.block_tokens))
        if isinstance(decision, Pair):
            self.index.expect(decision.prefill, blocks, self.view.now())
        self.index.expect(decision.decode, blocks, self.view.now())

    async def _try(self, job: Job, decision: Pair | Local, by: float) -> Accepted | NotTaken:
        # A run of its own for each try: the one whose answer was lost may be running.
        run = run_id(self.random)
        if isinstance(decision, Pair):
            return await self._on_pair(run, job, decision, by)
        charge = self.view.charge(decision.decode, prefill_tokens=decision.uncached, slots=1, blocks=decision.blocks)
        placement = Placement(run=run, job=job)
        no = await self._submit(self.subjects.decode_submit(decision.decode), placement, charge, by)
        return no or Accepted(run=run, prefill="", decode=decision.decode, router=self.bus.process)

    async def _on_pair(self, run: int, job: Job, pair: Pair, by: float) -> Accepted | NotTaken:
        no = await self._reserve(run, job, pair, by)
        if no is not None:
            return no
        taken = False
        try:
            if job in self.cancelled:
                return NotTaken(pair.prefill, "cancelled")
            charge = self.view.charge(pair.prefill, prefill_tokens=pair.uncached)
            placement = Placement(run=run, job=job, decode=pair.decode, fetch=pair.fetch)
            no = await self._submit(self.subjects.prefill_submit(pair.prefill), placement, charge, by)
            taken = no is None
        finally:
            if not taken:
                self._release(run, pair)
        return no or Accepted(run=run, prefill=pair.prefill, decode=pair.decode, router=self.bus.process)

    async def _reserve(self, run: int, job: Job, pair: Pair, by: float) -> NotTaken | None:
        suspect = job.job if job.suspect else ""
        item = LeaseItem(run=run, verb=LeaseVerb.RESERVE, blocks=pair.blocks, suspect=suspect)
        lease = Lease(process=self.bus.process, items=(item,))
        charge = self.view.charge(pair.decode, slots=1, blocks=pair.blocks)
        answer: LeaseAnswer | None = await self._ask(self.subjects.decode_lease(pair.decode), lease, LeaseAnswer, charge, by)
        if answer is None:
            self._release(run, pair)  # the answer may have been lost, not the request
            return NotTaken(pair.decode, NO_ANSWER)
        result = next((result for result in answer.results if result.run == run), None)
        if result is not None and result.ok:
            return None
        return NotTaken(pair.decode, result.reason if result is not None else NO_ANSWER)

    async def _submit(self, subject: str, placement: Placement, charge: Charge, by: float) -> NotTaken | None:
        """None: it is taken."""
        answer: Accept | Refuse | None = await self._ask(subject, placement, WorkerAnswer, charge, by)
        match answer:
            case Accept(run=placement.run):
                return None
            case Refuse(reason=reason):
                return NotTaken(charge.process, reason)
        return NotTaken(charge.process, NO_ANSWER)

    async def _ask(self, subject: str, message: Message, kind: Any, charge: Charge, by: float) -> Any:
        """The answer, its credits learnt; None when there is none in time. Raises `MessageTooLarge`."""
        try:
            answer = await ask(self.bus, subject, message, kind, timeout=max(0.0, min(ASK_S, _left(by))))
        except MessageTooLarge:
            self.view.undo(charge)
            raise
        except Disconnected:
            self.view.undo(charge)
            return None
        except NoResponders:
            self.view.undo(charge, ok=False)
            return None
        except (BusError, UnreadableMessage):
            self.view.lose(charge)
            return None
        except BaseException:  # we are cancelled: it may have been heard
            self.view.lose(charge)
            raise
        own_error = isinstance(answer, Refuse) and answer.reason in OWN_ERRORS
        self.view.settle(charge, answer.credits, ok=not own_error)
        return answer

    def _release(self, run: int, pair: Pair) -> None:
        lease = Lease(process=self.bus.process, items=(LeaseItem(run=run, verb=LeaseVerb.RELEASE),))
        try:
            send(self.bus, self.subjects.decode_lease(pair.decode), lease)
        except BusError:
            return  # the lease runs out by itself
        self.view.give_back(pair.decode, slots=1, blocks=pair.blocks)


def _left(by: float) -> float:
    return by - asyncio.get_running_loop().time()
