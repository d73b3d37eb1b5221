"""Takes handoffs, pulls their KV blocks, joins the runs to the engine's batch; or prefills here when told to.

Owns the stages HANDING_OFF and DECODING of hop 2. Invariant: a pulled block is computed on only after its release was answered
*ok*; the first frame repeats the first token, so that decode's stream alone is complete.
"""

from __future__ import annotations

from functools import partial

from schemas.errors import HeadraceError
from schemas.handoff import Handoff, OfferRequest
from schemas.lifecycle import State
from schemas.placement import Lease, Placement, WorkerAnswer
from services.bus.interface import Msg
from services.bus.typed import Refusals, answer, listen
from services.decode.first import output
from services.decode.leases import Leases
from services.decode.loans import Loans
from services.decode.opaque import OpaqueHandoffs
from services.engine.protocol import DecodeEngine, RunSpec
from services.kv.holders import ReservationHolder, RunHolder
from services.kv.pool import PoolExhausted
from services.kv.transfer.interface import TransferClient, TransferError, TransferServer
from services.worker.admission import queue_refusal, refusal
from services.worker.isolation import begin_alone, make_alone
from services.worker.runs import Run
from services.worker.waiting import begin, give_up
from services.worker.worker import Worker

PULL_S = 30.0


class Decode:
    """`server` lends what the prefix cache has."""

    def __init__(self, worker: Worker, engine: DecodeEngine, transfer: TransferClient, server: TransferServer) -> None:
        self._worker = worker
        self._engine = engine
        self._transfer = transfer
        self._leases = Leases(worker)
        self._loans = Loans(worker, server)
        self._opaque = OpaqueHandoffs(worker, engine)

    async def start(self, refusals: Refusals) -> None:
        bus, subjects = self._worker.bus, self._worker.subjects
        await listen(bus, subjects.decode_lease(bus.process), Lease, self._leases.on_lease, refusals=refusals)
        await listen(bus, subjects.decode_offer(bus.process), OfferRequest, self._loans.on_request, refusals=refusals)
        await listen(bus, subjects.decode_handoff(bus.process), Handoff, self._on_handoff, refusals=refusals)
        await listen(bus, subjects.decode_submit(bus.process), Placement, self._on_submit, refusals=refusals)

    # a handoff

    def _on_handoff(self, handoff: Handoff, msg: Msg) -> None:
        answer(self._worker.bus, msg, self._take(handoff))

    def _take(self, handoff: Handoff) -> WorkerAnswer:
        worker, run = self._worker, handoff.run
        if handoff.opaque:
            return self._opaque.take(handoff)
        reason = refusal(worker, run, handoff.job, begun=True) or self._unusable(handoff)
        if reason:
            return worker.refused(run, reason)
        try:
            here = self._claim(handoff)
        except PoolExhausted:
            return worker.refused(run, "no_blocks")
        taken = worker.admit(run, handoff.job, 2, State.HANDING_OFF, lambda: None, handoff.prefill)
        worker.stage(taken, self._pull(taken, handoff, here), partial(give_up, worker), f"pull {run}")
        return worker.accepted(run)

    def _unusable(self, handoff: Handoff) -> str:
        info = self._engine.info
        choices = handoff.job.open_choices
        alone = len(choices) == 1
        filled = handoff.job.prompt_tokens + (len(choices[0].generated) if alone else 0)
        if handoff.kv_compat != info.kv_compat:
            return "other_kv"
        if handoff.ticket is None or (alone and not handoff.first) or len(handoff.blocks) != -(-filled // info.block_tokens):
            return "unusable"
        return ""

    def _claim(self, handoff: Handoff) -> int:
        """Hold the run's blocks: first those that the prefix cache has, then room for the others. How many the first are.

        The room is the reservation's, or new when that is gone or too small; what is too much is given back. Raises
        PoolExhausted; then the run holds nothing.
        """
        pool, reservation, holder = self._engine.pool, ReservationHolder(handoff.run), RunHolder(handoff.run)
        if pool.alive(reservation, self._worker.clock.monotonic()):
            pool.transfer(reservation, holder)
        here = pool.prefix.match([block.hash for block in handoff.blocks])
        try:
            pool.claim(holder, max(len(handoff.blocks), len(pool.blocks(holder))), here)
        except PoolExhausted:
            pool.release(holder)
            raise
        return len(here)

    async def _pull(self, run: Run, handoff: Handoff, here: int) -> None:
        reason = await self._fetch(run, handoff, here)
        if not reason and run.job.suspect and not await make_alone(self._worker, run):
            reason = "not_alone"
        begin(self._worker, run, partial(self._join, run, handoff), reason)

    async def _fetch(self, run: Run, handoff: Handoff, here: int) -> str:
        """Copy all but the first `here` blocks and release the handoff; why that failed, "" when the blocks are ours."""
        pool, blocks = self._engine.pool, self._engine.pool.blocks(RunHolder(run.id))
        assert handoff.ticket is not None  # checked before the run was taken
        missing = handoff.blocks[here:]
        into = [pool.view(block) for block in blocks[here : len(handoff.blocks)]]
        timeout = min(PULL_S, run.deadline - self._worker.clock.monotonic())
        try:
            fetched = await self._transfer.fetch(handoff.ticket, missing, into, kv_compat=handoff.kv_compat, timeout=timeout)
            async with fetched:
                if not await fetched.release():
                    return "handoff_expired"
            await pool.stage_in(blocks[here : len(handoff.blocks)])
            return ""
        except TransferError as error:
            return f"handoff_{error.code}"

    def _join(self, run: Run, handoff: Handoff) -> None:
        first = handoff.first
        self._engine.decode(RunSpec.of(run.id, run.job), first, cached_tokens=handoff.cached_tokens, compute_s=handoff.compute_s)
        self._worker.advance(run, State.DECODING)
        for token in first:
            self._worker.frame(run, output(run.id, token, handoff))
        if run.stopped:
            self._engine.cancel(run.id, run.stopped)

    # local prefill

    def _on_submit(self, placement: Placement, msg: Msg) -> None:
        answer(self._worker.bus, msg, self._prefill_here(placement))

    def _prefill_here(self, placement: Placement) -> WorkerAnswer:
        worker, job, run = self._worker, placement.job, placement.run
        reason = refusal(worker, run, job)
        if job.suspect and not worker.suspects.ask(job.job):
            reason = reason or "isolating"
        if not reason and job.suspect:
            worker.suspects.leave(job.job)
            admitted = worker.admit(run, job, 2, State.PREFILLING, lambda: None)
            begin_alone(worker, admitted, lambda: self._engine.prefill(RunSpec.of(run, job), then_decode=True))
            return worker.accepted(run)
        reason = reason or self._no_slot() or queue_refusal(worker, job)
        if not reason:
            try:
                self._engine.prefill(RunSpec.of(run, job), then_decode=True)
            except HeadraceError as error:
                reason = error.code or "refused"
        if reason:
            return worker.refused(run, reason)
        worker.admit(run, job, 2, State.PREFILLING, lambda: self._engine.cancel(run))
        return worker.accepted(run)

    def _no_slot(self) -> str:
        return "no_slot" if self._worker.beats.decode_slots < 1 else ""
