"""Handoffs of engines that move KV themselves: decode's engine fetches, and prefill's keeps the blocks until it did.

Owns the stage HANDING_OFF of such runs. Invariant: a handoff that came and can be used is consumed, whatever became of its
client: a run that nobody wants any more begins and is dropped, which the engine heeds after its first chunk. None is consumed
twice.
"""

from __future__ import annotations

from functools import partial

from schemas.errors import HeadraceError
from schemas.handoff import Handoff
from schemas.lifecycle import State
from schemas.placement import WorkerAnswer
from services.decode.first import output
from services.engine.protocol import DecodeEngine, RunSpec
from services.kv.holders import ReservationHolder, RunHolder
from services.worker.admission import refusal
from services.worker.isolation import make_alone
from services.worker.runs import Run
from services.worker.waiting import give_up
from services.worker.worker import Worker

_Ending = tuple[State, str]


class OpaqueHandoffs:
    def __init__(self, worker: Worker, engine: DecodeEngine) -> None:
        self._worker = worker
        self._engine = engine

    def take(self, handoff: Handoff) -> WorkerAnswer:
        worker, run = self._worker, handoff.run
        if worker.runs.known(run):
            return worker.refused(run, "duplicate")
        if handoff.kv_compat != self._engine.info.kv_compat:
            return worker.refused(run, "other_kv")
        ending = _ending(refusal(worker, run, handoff.job, begun=True))
        self._claim(run)
        if handoff.job.suspect:
            taken = worker.admit(run, handoff.job, 2, State.HANDING_OFF, _not_yet, handoff.prefill)
            worker.stage(taken, self._take_alone(taken, handoff, ending), partial(give_up, worker), f"alone {run}")
            taken.stop = _not_yet
            return worker.accepted(run)
        try:
            self._begin(handoff)
        except HeadraceError as error:
            self._engine.pool.release(RunHolder(run))
            return worker.refused(run, error.code or "unusable")
        taken = worker.admit(run, handoff.job, 2, State.HANDING_OFF, lambda: self._engine.cancel(run), handoff.prefill)
        self._joined(taken, handoff, ending)
        return worker.accepted(run)

    async def _take_alone(self, run: Run, handoff: Handoff, ending: _Ending | None) -> None:
        """A run that may kill this process: the others end first. It is dropped only once its handoff is being consumed."""
        if not await make_alone(self._worker, run):
            ending = ending or (State.RETRY, "not_alone")
        self._begin(handoff)
        run.stop = lambda: self._engine.cancel(run.id)
        if run.stopping:
            run.stop()
        self._joined(run, handoff, ending)

    def _begin(self, handoff: Handoff) -> None:
        self._engine.decode(
            RunSpec.of(handoff.run, handoff.job),
            handoff.first,
            cached_tokens=handoff.cached_tokens,
            compute_s=handoff.compute_s,
            opaque=handoff.opaque,
        )

    def _joined(self, run: Run, handoff: Handoff, ending: _Ending | None) -> None:
        for token in handoff.first:
            self._worker.frame(run, output(run.id, token, handoff))
        if ending is not None:
            self._worker.drop(run, *ending)
        self._worker.outbox.flush()

    def _claim(self, run: int) -> None:
        """The room that was reserved is the run's; the engine takes more, or less, as it needs."""
        pool, reservation = self._engine.pool, ReservationHolder(run)
        if pool.alive(reservation, self._worker.clock.monotonic()):
            pool.transfer(reservation, RunHolder(run))


def _ending(reason: str) -> _Ending | None:
    """What a run ends as that would not have been taken, were its handoff not here. A worker that drains keeps its promises."""
    match reason:
        case "" | "draining":
            return None
        case "cancelled":
            return State.CANCELLED, ""
        case "expired":
            return State.EXPIRED, "total_deadline"
        case _:
            return State.RETRY, reason


def _not_yet() -> None:
    """It cannot be dropped before the engine has its handoff."""
