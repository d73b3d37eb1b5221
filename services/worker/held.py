"""The jobs of one worker, for operators: what runs here, and the end of one of them, told to its client by its edge.

Owns nothing.
"""

from __future__ import annotations

from schemas.admin import CancelAnswer, HeldJob
from schemas.errors import NotFound
from schemas.lifecycle import State
from schemas.reply import BY_OPERATOR, Frames, by_operator
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
            self._worker.drop(run, State.CANCELLED, BY_OPERATOR)
            run.ending = (State.CANCELLED, BY_OPERATOR)  # also of one that was to go on elsewhere
        bus, told = self._worker.bus, by_operator(job)
        for reply_to in {run.job.reply_to for run in runs}:
            send(bus, reply_to, Frames(process=bus.process, events=(told,)))
        return CancelAnswer(job=job)


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
