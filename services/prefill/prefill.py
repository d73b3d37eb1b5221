"""Takes placements, has the engine compute the prompt, and hands the KV blocks to the decode worker that reserved room.

Owns the stages PREFILLING and HANDING_OFF of hop 1. Invariant: the blocks of a run are held by the run, then by its handoff under
a lease, and by nothing after the run left this worker.
"""

from __future__ import annotations

import asyncio
from functools import partial

from schemas.errors import HeadraceError
from schemas.handoff import BlockRef, Handoff, Ticket
from schemas.lifecycle import State
from schemas.placement import Accept, Placement, WorkerAnswer
from services.bus.interface import Msg
from services.bus.typed import Refusals, answer, ask, listen
from services.engine.admission import admit
from services.engine.protocol import PrefillEngine, RunSpec
from services.kv.holders import HandoffHolder, Holder, RunHolder
from services.kv.transfer.interface import Outcome, TransferClient, TransferServer
from services.prefill.fetching import Fetching, Wanted
from services.prefill.first import first_token
from services.prefill.opaque import OpaqueHandoffs
from services.prefill.reservations import Reservations
from services.worker.admission import queue_refusal, refusal
from services.worker.isolation import begin_alone
from services.worker.runs import Run
from services.worker.waiting import begin, give_up
from services.worker.worker import Worker

HANDOFF_ANSWER_S = 0.3
HANDOFF_S = 60.0
"""The longest a handoff may take; its lease ends it much earlier when decode is gone."""
OFFER_LEASE_S = 2.0


class Prefill:
    """`server` offers what was computed here; with `client` prefill fetches what is cached elsewhere."""

    def __init__(self, worker: Worker, engine: PrefillEngine, server: TransferServer, client: TransferClient) -> None:
        self._worker = worker
        self._engine = engine
        self._transfer = server
        self._fetching = Fetching(worker, client)
        self._reservations = Reservations(worker)
        self._opaque = OpaqueHandoffs(worker, engine)
        worker.on_prefilled = self._prefilled
        worker.on_end.append(self._reservations.release)

    async def start(self, refusals: Refusals) -> None:
        worker = self._worker
        await listen(worker.bus, worker.subjects.prefill_submit(worker.bus.process), Placement, self._submit, refusals=refusals)
        worker.spawn(self._reservations.renew_all(), "renew reservations")

    # PREFILLING

    def _submit(self, placement: Placement, msg: Msg) -> None:
        answer(self._worker.bus, msg, self._admit(placement))

    def _admit(self, placement: Placement) -> WorkerAnswer:
        worker, job, run = self._worker, placement.job, placement.run
        to_fetch = placement.fetch.blocks * self._engine.info.block_tokens if placement.fetch is not None else 0
        reason = refusal(worker, run, job) or ("" if placement.decode else "no_decode")
        if not reason and job.suspect:
            admitted = worker.admit(run, job, 1, State.PREFILLING, lambda: None, placement.decode)
            begin_alone(worker, admitted, lambda: self._engine.prefill(RunSpec.of(run, job)))
            return worker.accepted(run)
        reason = reason or queue_refusal(worker, job, to_fetch) or self._begin(placement)
        return worker.refused(run, reason) if reason else worker.accepted(run)

    def _begin(self, placement: Placement) -> str:
        """Give the run to the engine, or fetch first what it need not compute. Why neither is possible, "" when it began."""
        worker, job, run = self._worker, placement.job, placement.run
        spec = RunSpec.of(run, job)
        wanted = self._fetching.wanted(spec, placement.fetch)
        try:
            if wanted is None:
                self._engine.prefill(spec)
            else:
                admit(self._engine.info, spec)
                self._fetching.claim(spec, wanted)
        except HeadraceError as error:
            return error.code or "refused"
        admitted = worker.admit(run, job, 1, State.PREFILLING, lambda: self._engine.cancel(run), placement.decode)
        if wanted is not None:
            admitted.to_come = len(spec.trunk) - len(wanted.hashes) * self._engine.info.block_tokens
            worker.stage(admitted, self._fetch_first(admitted, spec, wanted), partial(give_up, worker), f"fetch {run}")
        return ""

    async def _fetch_first(self, run: Run, spec: RunSpec, wanted: Wanted) -> None:
        await self._fetching.fetch(run.id, wanted, within=run.deadline - self._worker.clock.monotonic())
        run.to_come = 0
        begin(self._worker, run, lambda: self._engine.prefill(spec))

    # HANDING_OFF

    def _prefilled(self, run: Run) -> None:
        self._worker.advance(run, State.HANDING_OFF)
        if run.totals.opaque:
            self._opaque.begin(run)
        else:
            self._worker.stage(run, self._hand_off(run), self._handoff_stopped, f"handoff {run.id}")

    async def _hand_off(self, run: Run) -> None:
        """Offer, wait for decode's *ok*, let go. Every other way out ends the attempt here."""
        started = self._worker.clock.monotonic()
        holder = HandoffHolder(run.id)
        pool = self._engine.pool
        pool.transfer(RunHolder(run.id), holder, expires=started + OFFER_LEASE_S)
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        try:
            ticket = self._transfer.offer(holder, kv_compat=self._engine.info.kv_compat, on_done=partial(_settle, done))
            reason = await self._ask_decode(run, self._handoff(run, holder, ticket))
            if not reason:
                async with asyncio.timeout(HANDOFF_S):
                    reason = "" if await done is Outcome.RELEASED else "handoff_lost"
        except TimeoutError:
            reason = "handoff_timeout"
        self._let_go(run)
        if reason:
            self._worker.end(run, State.RETRY, reason)
            self._worker.outbox.flush()
        else:
            self._worker.hand_on(run, run.partner)
            self._worker.metrics.handoff_time.record(self._worker.clock.monotonic() - started)
        self._worker.metrics.handoffs.add(1, {"outcome": reason or "released"})

    async def _ask_decode(self, run: Run, handoff: Handoff) -> str:
        """Why decode will not take it, "" when it does."""
        worker = self._worker
        subject = worker.subjects.decode_handoff(run.partner)
        try:
            taken = await ask(worker.bus, subject, handoff, WorkerAnswer, timeout=HANDOFF_ANSWER_S)
        except HeadraceError as error:
            return f"handoff_{error.code}"
        return "" if isinstance(taken, Accept) else "handoff_refused"

    def _handoff(self, run: Run, holder: Holder, ticket: Ticket) -> Handoff:
        info, pool, job = self._engine.info, self._engine.pool, run.job
        spec = RunSpec.of(run.id, job)
        names = (*spec.hashes(info), b"")
        return Handoff(
            run=run.id,
            job=job,
            prefill=self._worker.bus.process,
            first=tuple(map(first_token, run.last.values())),
            kv_compat=info.kv_compat,
            blocks=tuple(
                BlockRef(slot=block, generation=pool.generation(block), hash=names[position])
                for position, block in enumerate(pool.blocks(holder))
            ),
            tail_tokens=len(spec.trunk) % info.block_tokens,
            ticket=ticket,
            cached_tokens=run.totals.cached_tokens,
            compute_s=run.totals.compute_s,
        )

    def _handoff_stopped(self, run: Run) -> None:
        """The edge, or our own end, stopped the handoff; decode hears of it too, whether it took the run or not."""
        self._let_go(run)
        self._worker.end(run, *run.ending)
        self._worker.cancel_at(run.partner, run)

    def _let_go(self, run: Run) -> None:
        holder, pool = HandoffHolder(run.id), self._engine.pool
        self._transfer.revoke(holder)
        pool.release(holder)
        pool.release(RunHolder(run.id))  # a handoff that was stopped before it began


def _settle(done: asyncio.Future[Outcome], _: Holder, outcome: Outcome) -> None:
    if not done.done():  # whoever waited may have been cancelled
        done.set_result(outcome)
