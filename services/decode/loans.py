"""Lends cached KV blocks to a prefill worker that would compute them again: the last turns of a chat that was decoded here.

Owns the answers to `hr.decode.<id>.offer`. Must not know runs: the one that is named computes elsewhere. Invariant: what is lent
is on offer, so it is held under a lease that ends with its reader, and 5 s after the answer when nobody came.
"""

from __future__ import annotations

from schemas.handoff import BlockRef, Offer, OfferRequest
from services.bus.interface import Msg
from services.bus.typed import answer
from services.kv.holders import Holder, LoanHolder
from services.kv.transfer.interface import Outcome, TransferServer
from services.worker.worker import Worker

LEASE_S = 2.0


class Loans:
    def __init__(self, worker: Worker, transfer: TransferServer) -> None:
        self._worker = worker
        self._transfer = transfer

    def on_request(self, request: OfferRequest, msg: Msg) -> None:
        answer(self._worker.bus, msg, self._lend(request))

    def _lend(self, request: OfferRequest) -> Offer:
        pool, holder = self._worker.engine.pool, LoanHolder(request.run)
        blocks = pool.prefix.match(request.hashes)
        reason = self._refusal(request, len(blocks))
        if reason:
            return Offer(run=request.run, reason=reason)
        pool.hold(holder, blocks, expires=self._worker.clock.monotonic() + LEASE_S)
        ticket = self._transfer.offer(holder, kv_compat=request.kv_compat, on_done=self._ended)
        lent = zip(blocks, request.hashes, strict=False)  # the longest beginning that is here
        refs = tuple(BlockRef(slot=block, generation=pool.generation(block), hash=name) for block, name in lent)
        return Offer(run=request.run, blocks=refs, ticket=ticket)

    def _refusal(self, request: OfferRequest, found: int) -> str:
        """Why nothing is lent, "" when something is."""
        if request.kv_compat != self._worker.engine.info.kv_compat:
            return "other_kv"
        if self._worker.isolates:
            return "isolating"
        if not self._worker.engine.pool.block_bytes:
            return "not_ours"  # the engine keeps them
        if found <= request.have:
            return "not_cached"
        return "duplicate" if LoanHolder(request.run) in self._worker.engine.pool.holders else ""

    def _ended(self, _: Holder, outcome: Outcome) -> None:
        self._worker.beats.changed()  # blocks that were pinned can be given out again
