"""What time does to a worker: leases run out, deadlines pass, edges fall silent, memories fade."""

from __future__ import annotations

import asyncio

from schemas.lifecycle import State
from services.bus.silence import SILENT_S
from services.worker.worker import Worker

SWEEP_S = 0.25
CUT_OFF_S = 10.0
"""While our connection is down runs go on into the replay ring, then pause; after this their edges have gone on without us."""


async def keep_up(worker: Worker) -> None:
    """Every 250 ms, for as long as the worker lives."""
    while True:
        await asyncio.sleep(SWEEP_S)
        sweep(worker)


def sweep(worker: Worker) -> None:
    """A pause that is over, an engine that stands still, leases that ran out, deadlines, edges that are gone, old memories."""
    now = worker.clock.monotonic()
    if worker.bus.steady_for() >= SILENT_S:  # reservations are renewed over the bus
        worker.engine.pool.expire(now)
    if worker.bus.connected:
        worker.engine.resume()
    if worker.stalls.look(worker.engine.stats()):
        worker.beats.say()  # before a digest says it: routers must know when the edges submit again
    cut_off = worker.bus.down_for() > CUT_OFF_S
    for run in worker.runs:
        if run.deadline <= now:
            worker.drop(run, State.EXPIRED, "total_deadline")
        elif cut_off and not run.job.detached:
            worker.drop(run, State.CANCELLED, "cut_off")
    drop_jobs_of_gone_edges(worker)
    worker.runs.sweep()
    worker.ring.sweep()
    worker.edges.sweep()


def drop_jobs_of_gone_edges(worker: Worker) -> None:
    """Dead edges cost nothing."""
    for run in worker.runs:
        if not run.job.detached and worker.edges.gone(run.job.edge):
            worker.drop(run, State.CANCELLED, "edge_gone")
