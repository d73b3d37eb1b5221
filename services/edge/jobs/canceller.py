"""A cancel is repeated until it is confirmed, and bounded.

Owns: who has confirmed what. An owner is told each 100 ms until the run's terminal event; while nobody owns the job, all routers
are told until each one heard lately has answered. What speaks up later is answered by `Strangers`. Invariant: thousands of
clients that leave at once cost a message each, and no more than `MOST_PER_S` repeats, whose answers this edge has to read.
"""

from __future__ import annotations

import asyncio

from schemas.control import CancelAck
from services.bus.interface import Msg
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire

MOST_PER_S = 4000
"""Repeats of all cancels together; each waits longer than 100 ms while there are more."""


class Canceller:
    def __init__(self, wire: Wire, board: ModelBoard, timing: Timing) -> None:
        self._wire = wire
        self._board = board
        self._timing = timing
        self._acks: dict[str, set[str]] = {}

    async def cancel(self, job: ActiveJob) -> None:
        """Returns when the job's compute is known to have ended, or after `cancel_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timing.cancel_s
        acks = self._acks[job.id] = set()
        told = False
        try:
            while not job.over.done() and loop.time() < deadline:
                if job.run:
                    self._wire.cancel_owners(job)
                elif told and acks.issuperset(self._board.routers()):
                    return
                else:
                    self._wire.cancel_job(job)
                    told = told or self._wire.bus.connected
                await asyncio.wait({job.over}, timeout=max(self._timing.repeat_s, len(self._acks) / MOST_PER_S))
        finally:
            if self._acks.get(job.id) is acks:  # else a later cancel of the job has taken its place
                del self._acks[job.id]

    def on_ack(self, ack: CancelAck, _: Msg) -> None:
        """One router's answer, on the cancel inbox."""
        if ack.job in self._acks:
            self._acks[ack.job].add(ack.router)
