"""Draining a worker: readiness false first, no new work, running work finishes or moves elsewhere."""

from __future__ import annotations

import logging

from schemas.lifecycle import State
from services.worker.worker import Worker

_log = logging.getLogger(__name__)


async def drain(worker: Worker, timeout: float) -> None:
    """No new work; running work finishes, or ends as RETRY so that the edge goes on elsewhere."""
    worker.beats.draining = True
    worker.beats.say()
    if await worker.idle(timeout):
        return
    _log.warning("%d runs did not finish in %.0f s; their edges try again elsewhere", len(worker.runs), timeout)
    for unfinished in worker.runs:
        worker.drop(unfinished, State.RETRY, "draining")
    await worker.idle(1.0)
