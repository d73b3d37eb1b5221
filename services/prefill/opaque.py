"""Handoffs of engines that move KV themselves: the engine keeps a run's blocks until decode's engine has fetched them.

Owns the stage HANDING_OFF of such runs. Invariant: what the engine handed off is passed on, whatever became of the client,
because nothing else but a timeout of the engine frees it; a run that was cancelled is dropped by decode afterwards.
"""

from __future__ import annotations

import asyncio

from schemas.errors import HeadraceError
from schemas.handoff import Handoff
from schemas.lifecycle import State
from schemas.placement import Accept, WorkerAnswer
from services.bus.typed import ask
from services.engine.protocol import PrefillEngine
from services.prefill.first import first_token
from services.worker.runs import Run
from services.worker.worker import Worker

ANSWER_S = 0.3
ASKS = 4
AGAIN_S = 0.1


class OpaqueHandoffs:
    def __init__(self, worker: Worker, engine: PrefillEngine) -> None:
        self._worker = worker
        self._engine = engine

    def begin(self, run: Run) -> None:
        """The run's prompt is computed, and its blocks wait in the engine."""
        self._worker.stage(run, self._pass_on(run), self._stopped, f"handoff {run.id}")
        run.stop = _not_now

    async def _pass_on(self, run: Run) -> None:
        worker = self._worker
        started = worker.clock.monotonic()
        reason = await self._ask(run, self._handoff(run))
        if reason:
            worker.end(run, *(run.ending if run.stopping else (State.RETRY, reason)))
            worker.outbox.flush()
        else:
            worker.hand_on(run, run.partner)
            if run.stopping and run.ending[0] is not State.RETRY:
                worker.cancel_at(run.partner, run)
            worker.metrics.handoff_time.record(worker.clock.monotonic() - started)
        worker.metrics.handoffs.add(1, {"outcome": reason or "released"})

    async def _ask(self, run: Run, handoff: Handoff) -> str:
        """Why decode does not take it, "" when it does. Asked until it answers, for it knows a run that it took before."""
        subject, reason = self._worker.subjects.decode_handoff(run.partner), ""
        for turn in range(ASKS):
            if turn:
                await asyncio.sleep(AGAIN_S)
            try:
                taken = await ask(self._worker.bus, subject, handoff, WorkerAnswer, timeout=ANSWER_S)
            except HeadraceError as error:
                reason = f"handoff_{error.code}"
                continue
            had_it = not isinstance(taken, Accept) and turn > 0 and taken.reason == "duplicate"
            return "" if isinstance(taken, Accept) or had_it else "handoff_refused"
        return reason

    def _handoff(self, run: Run) -> Handoff:
        return Handoff(
            run=run.id,
            job=run.job,
            prefill=self._worker.bus.process,
            first=tuple(map(first_token, run.last.values())),
            kv_compat=self._engine.info.kv_compat,
            cached_tokens=run.totals.cached_tokens,
            compute_s=run.totals.compute_s,
            opaque=run.totals.opaque,
        )

    def _stopped(self, run: Run) -> None:
        """This process ends, or a fault of ours."""
        self._worker.end(run, *run.ending)


def _not_now() -> None:
    """It is passed on first; then decode is told to drop it."""
