"""Runs of which nothing is heard any more: their attempt ends, and another one begins.

Owns one look each 250 ms at every job that somebody owns. Invariant: what our own silence may have caused is held against nobody:
our connection was down or has just come back, this process stood still, or the bus seems to carry nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemas.errors import Unavailable
from services.bus.interface import Bus
from services.bus.silence import QUIET_S, SILENT_S, TOGETHER_S, is_the_bus, patience
from services.clock import Clock
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.peers import Peers
from services.edge.jobs.timing import Timing

EVERY_S = 0.25
STALL_S = 2.0
"""What a new owner gets before its engine's standing still counts: it may be the only one there is."""
DIGESTS = 2
"""Digests of its owner that may lack a run."""


class Vigil:
    def __init__(self, jobs: Mapping[str, ActiveJob], peers: Peers, bus: Bus, clock: Clock, timing: Timing) -> None:
        self._jobs = jobs
        self._peers = peers
        self._bus = bus
        self._clock = clock
        self._timing = timing

    async def run(self) -> None:
        """Until cancelled."""
        looked = self._clock.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            now = self._clock.monotonic()
            if now - looked < 1.0:  # else this process stood still: what it was told meanwhile comes first
                self.look()
            looked = now

    def look(self) -> None:
        """End the attempts whose run is lost."""
        self._peers.forget_old()
        if self._bus.down_for() > self._timing.cut_off_s:
            for job in self._jobs.values():
                if not job.closed and not job.detached:
                    self._end(job, "cut_off")  # `JobLife` tells the clients
        if self._bus.steady_for() < self._timing.settle_s:
            return
        owned = [job for job in self._jobs.values() if job.hop and not job.over.done() and not job.closed]
        if not owned:
            return
        now, heard = self._clock.monotonic(), self._peers.heard({job.owner for job in owned})
        for job in owned:
            silent = now - job.word.at
            if self._left_out(job):
                self._end(job, "missing")
            elif silent > SILENT_S and silent > patience(job.word.at, heard, now):
                self._end(job, "silent")

    def disconnected(self, process: str) -> None:
        """A router saw the connection of this worker end and not come back: its runs begin again elsewhere. It is no death."""
        now, word = self._clock.monotonic(), self._peers.last(process)
        at = word.at if word is not None else now - TOGETHER_S
        if now - at <= QUIET_S or self._bus.steady_for() < self._timing.settle_s:
            return
        lost = [job for job in self._jobs.values() if job.in_charge == process and not job.over.done() and not job.closed]
        heard = self._peers.heard({process, *(job.owner for job in self._jobs.values())})
        if not is_the_bus(at, heard, now, QUIET_S):
            for job in lost:
                self._end(job, "disconnected")

    def stalled(self, job: ActiveJob) -> None:
        """Its owner says that its engine stands still, although the run computes. Where all do, each gets its time."""
        if not job.over.done() and not job.closed and self._clock.monotonic() - job.owned_at > STALL_S:
            self._end(job, "stalled")

    def _left_out(self, job: ActiveJob) -> bool:
        """The owner's last digests do not mention the run."""
        last = self._peers.last(job.owner)
        return last is not None and job.word.process == job.owner and last.digests - job.word.digests >= DIGESTS

    def _end(self, job: ActiveJob, kind: str) -> None:
        job.end_attempt(AttemptEnd(kind, Unavailable("The worker of this request was lost.", retry_after=1.0), alive=True))
