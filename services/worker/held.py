"""The jobs of one worker, for operators: what runs here, and the end of one of them, told to its client by its edge.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.admin import CancelAnswer, HeldJob
from schemas.errors import NotFound
from schemas.reply import Frames, by_operator
from services.bus.typed import send
from services.worker.runs import Run
from services.worker.worker import Worker


class Held:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def jobs(self) -> list[HeldJob]:
        """Runs that are here, in whatever stage."""
        return [_row(self._worker, run) for run in self._worker.runs]

    def cancel(self, job: str) -> CancelAnswer:
        """Drop the runs of `job`, and tell its edge that it was an operator, so it resumes none.

        Their last event says it too, unless a run is on its way to another worker. Raises `NotFound`, `Disconnected`.
        """
        runs = [run for run in self._worker.runs if run.job.job == job]
        if not runs:
            raise NotFound(f"There is no job {job[:64]!r} here.")
        for run in runs:
            self._worker.drop_by_operator(run)
        bus, event = self._worker.bus, by_operator(job)
        for reply_to in sorted(self._edges(runs)):
            send(bus, reply_to, Frames(process=bus.process, events=(event,)))
        return CancelAnswer(job=job)

    def _edges(self, runs: Sequence[Run]) -> set[str]:
        """Where these jobs' edges listen. The edge of a detached job may be dead, and any other may have taken the job over."""
        edges = {run.job.reply_to for run in runs}
        if any(run.job.detached for run in runs):
            edges.update(map(self._worker.subjects.reply, self._worker.edges.alive()))
        return edges


def _row(worker: Worker, run: Run) -> HeldJob:
    job = run.job
    return HeldJob(
        job=job.job,
        state=run.state,
        model=job.model,
        tier=job.tier,
        lane=job.lane,
        attempt=job.attempt,
        age_s=round(worker.clock.monotonic() - run.deadline + job.deadlines.total, 3),
        run=f"{run.id:016x}",
        worker=worker.bus.process,
        edge=job.edge,
    )
