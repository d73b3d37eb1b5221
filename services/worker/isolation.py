"""A job that may kill its worker computes alone: every other run ends first, as RETRY, and its edge has been told.

Owns the order of these steps. Must not know phases. Invariant: when a suspect takes the process with it, no other job is counted
a death, because the server had their ends before the suspect's first step here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from schemas.errors import BusError
from schemas.lifecycle import State
from services.worker.runs import Run
from services.worker.waiting import begin, give_up
from services.worker.worker import Worker

WITHIN_S = 2.0
"""The others end within the step in progress; the server answers a ping in a millisecond."""


def make_room(worker: Worker, run: Run | None = None) -> None:
    """Have every run of `worker` but this one end, within the step in progress."""
    for other in worker.runs:
        if other is not run:
            worker.drop(other, State.RETRY, "isolated")


async def make_alone(worker: Worker, run: Run) -> bool:
    """End every other run of `worker`. False when they did not end in time, or NATS could not be told."""
    make_room(worker, run)
    try:
        async with asyncio.timeout(WITHIN_S):
            while len(worker.runs) > 1:
                await worker.run_left()
        worker.outbox.flush()
        await worker.bus.flush(WITHIN_S)
    except (TimeoutError, BusError):
        return False
    return True


def begin_alone(worker: Worker, run: Run, give: Callable[[], None]) -> None:
    """A stage of `run` that gives it to the engine with `give` once it is alone. It ends as RETRY when that is not possible."""

    async def wait() -> None:
        begin(worker, run, give, "" if await make_alone(worker, run) else "not_alone")

    worker.stage(run, wait(), partial(give_up, worker), f"alone {run.id}")
