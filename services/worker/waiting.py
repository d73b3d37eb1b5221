"""A run that waits before the engine has it: for blocks, or for being alone. Then it goes to the engine, or it ends.

Must not know what it waited for. Invariant: a run that ends so leaves no block held.
"""

from __future__ import annotations

from collections.abc import Callable

from schemas.errors import HeadraceError
from schemas.lifecycle import State
from services.kv.holders import RunHolder
from services.worker.runs import Run
from services.worker.worker import Worker


def begin(worker: Worker, run: Run, give: Callable[[], object], reason: str = "") -> None:
    """`give` gives the run to the engine. When that refuses it, or there is a `reason` against it already, it ends as RETRY."""
    if not reason:
        try:
            give()
        except HeadraceError as error:
            reason = error.code or "refused"
    if reason:
        run.ending = (State.RETRY, reason)
        give_up(worker, run)
    else:
        run.stop = lambda: worker.engine.cancel(run.id)
    worker.outbox.flush()


def give_up(worker: Worker, run: Run) -> None:
    """It ends as `run.ending` says, before the engine had it."""
    worker.engine.pool.release(RunHolder(run.id))
    worker.end(run, *run.ending)
