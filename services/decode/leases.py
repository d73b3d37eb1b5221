"""Reservations on a decode worker: room for the blocks of a run that prefill still computes.

Owns the answers to `hr.decode.<id>.lease`; the pool's ledger owns the leases. Invariant: a reservation that nobody renews for
2 s is gone.
"""

from __future__ import annotations

from schemas.placement import Lease, LeaseAnswer, LeaseItem, LeaseResult, LeaseVerb
from services.bus.interface import Msg
from services.bus.typed import answer
from services.kv.holders import ReservationHolder
from services.kv.pool import PoolExhausted
from services.worker.isolation import make_room
from services.worker.worker import Worker

LEASE_S = 2.0


class Leases:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pool = worker.engine.pool
        self._suspect = 0
        """The last run that a suspect has room for; another one waits as long as that is kept."""
        worker.on_unknown_cancel.append(self.release)

    def on_lease(self, lease: Lease, msg: Msg) -> None:
        """The items one by one, in order."""
        results = tuple(self._apply(item) for item in lease.items)
        answer(self._worker.bus, msg, LeaseAnswer(results=results, credits=self._worker.beats.credits()))
        self._worker.beats.changed()

    def release(self, run: int) -> None:
        self._pool.release(ReservationHolder(run))

    def _apply(self, item: LeaseItem) -> LeaseResult:
        match item.verb:
            case LeaseVerb.RESERVE:
                reason = self._reserve(item)
                return LeaseResult(run=item.run, ok=not reason, reason=reason)
            case LeaseVerb.RENEW:
                now = self._worker.clock.monotonic()
                return LeaseResult(run=item.run, ok=self._pool.renew(ReservationHolder(item.run), now + LEASE_S, now=now))
            case LeaseVerb.RELEASE:
                self.release(item.run)
                return LeaseResult(run=item.run, ok=True)

    def _reserve(self, item: LeaseItem) -> str:
        """Why not, "" when the room is kept. Asked twice, it is kept once."""
        worker, holder = self._worker, ReservationHolder(item.run)
        now, line = worker.clock.monotonic(), worker.suspects
        if self._pool.renew(holder, now + LEASE_S, now=now):
            return ""
        self._pool.release(holder)  # a lease that ran out and was not swept yet
        if worker.beats.draining:
            return "draining"
        if not (line.ask(item.suspect) if item.suspect else not line) or worker.isolates:
            return "isolating"
        if item.suspect and self._pool.alive(ReservationHolder(self._suspect), now):
            return "isolating"
        if worker.runs.cancelled_early(item.run) or worker.runs.known(item.run):
            return "cancelled"
        reason = self._keep(holder, item.blocks, now + LEASE_S)
        if item.suspect and reason:
            make_room(worker)  # it comes again, and nobody else is taken meanwhile
        elif item.suspect:
            self._suspect = item.run
            line.leave(item.suspect)
        return reason

    def _keep(self, holder: ReservationHolder, blocks: int, until: float) -> str:
        if self._worker.beats.decode_slots < 1:
            return "no_slot"
        try:
            self._pool.allocate(holder, blocks, expires=until)
        except PoolExhausted:
            return "no_blocks"
        return ""
