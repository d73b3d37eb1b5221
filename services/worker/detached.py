"""Detached jobs at their owner: a run that outlives its edge, and that any edge which holds the job's row may take over.

Owns the subscriptions to `hr.job.<job>`, one for each detached job that is or a moment ago was here, and the time for which no
edge attended to a run. Knows no database. Invariant: nothing computes for longer than 30 s for a job that no edge holds; time in
which our own connection is down, or has just come back, does not count.
"""

from __future__ import annotations

import asyncio

import msgspec

from schemas.control import Control, Verb
from schemas.errors import BusError
from schemas.lifecycle import State
from schemas.reply import Digest
from services.bus.interface import Msg, Subscription
from services.bus.silence import SILENT_S
from services.bus.typed import Refusals, answer, listen
from services.worker.digests import entry
from services.worker.runs import UNATTENDED_S, Run
from services.worker.worker import Worker

EVERY_S = 0.25


def attach(worker: Worker, run: Run, control: Control) -> None:
    """An edge holds this job. With `reply_to` it has just taken it over: what is said of the run goes there."""
    if not control.reply_to:
        if control.edge == run.job.edge:
            run.unattended_s = 0.0
        return  # else: one that lost the job, and does not know yet
    run.unattended_s = 0.0
    worker.outbox.flush()
    run.job = msgspec.structs.replace(run.job, reply_to=control.reply_to, edge=control.edge or run.job.edge)
    worker.ring.redirect(run.id, control.reply_to)
    worker.edges.expect(run.job.edge)
    if run.state is State.HANDING_OFF and run.hop == 1:
        worker.tell(run.partner, control)  # it was told of the job as it was before
    worker.outbox.replay(run.id, control.positions)


class Attendance:
    def __init__(self, worker: Worker, refusals: Refusals) -> None:
        self._worker = worker
        self._refusals = refusals
        self._listening: dict[str, Subscription] = {}
        self._looked = worker.clock.monotonic()

    async def run(self) -> None:
        """For as long as the worker lives."""
        while True:
            self.look()
            await self._listen()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Drop the runs that no edge has attended to for too long."""
        worker, now = self._worker, self._worker.clock.monotonic()
        passed, self._looked = now - self._looked, now
        if worker.bus.steady_for() < SILENT_S:
            return
        for run in worker.runs:
            if run.job.detached:
                run.unattended_s += passed
                if run.unattended_s > UNATTENDED_S:
                    worker.drop(run, State.CANCELLED, "unattended")

    async def _listen(self) -> None:
        """To the jobs that are here, and to no others; while the bus is down, a moment later."""
        worker = self._worker
        here = {run.job.job for run in worker.runs.detached(UNATTENDED_S)}
        for job in self._listening.keys() - here:
            await self._listening.pop(job).unsubscribe()
        for job in here - self._listening.keys():
            subject = worker.subjects.attach(job)
            try:
                self._listening[job] = await listen(worker.bus, subject, Control, self._on_control, refusals=self._refusals)
            except BusError:
                return

    def _on_control(self, control: Control, msg: Msg) -> None:
        """From an edge that knows the job, and not who owns it."""
        worker = self._worker
        run = worker.runs.of_job(control.job, UNATTENDED_S)
        if run is None or not run.job.detached or control.verb is Verb.CANCEL:
            return
        answer(worker.bus, msg, Digest(process=worker.bus.process, runs=(entry(run),)))
        if control.verb is Verb.ATTACH:
            attach(worker, run, control)
        else:
            worker.outbox.replay(run.id, control.positions, control.reply_to)
