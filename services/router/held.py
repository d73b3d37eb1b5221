"""The jobs that a router knows of, for operators: those it is placing and those it counted in the queue. And the end of any job.

Owns nothing. A job's edge ends it, so whoever asks a router need not know which edge that is: all are told.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.admin import CancelAnswer, HeldJob
from schemas.errors import InvalidRequest, NotFound
from schemas.identity import is_job
from schemas.job import Job
from schemas.lifecycle import State
from schemas.reply import Frames, by_operator
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.router.submit import Submits
from services.router.waiting import Waiting
from services.worker.edges import EdgeWatch


class Held:
    def __init__(self, bus: Bus, subjects: Subjects, submits: Submits, waiting: Waiting, edges: EdgeWatch) -> None:
        self._bus = bus
        self._subjects = subjects
        self._submits = submits
        self._waiting = waiting
        self._edges = edges

    def jobs(self) -> Iterator[HeldJob]:
        """Of those in the queue only what their subjects say."""
        yield from map(self._placing, self._submits.placing())
        yield from self._waiting.jobs()

    def cancel(self, job: str) -> CancelAnswer:
        """Tell every edge; the one that has it ends it everywhere.

        Raises `InvalidRequest` for what cannot be a job, `NotFound` when no edge is heard, `Disconnected`.
        """
        if not is_job(job):
            raise InvalidRequest(f"{job[:64]!r} is no job: 32 hexadecimal digits")
        edges = sorted(self._edges.alive())
        if not edges:
            raise NotFound("No edge is heard.")
        event = by_operator(job)
        for edge in edges:
            send(self._bus, self._subjects.reply(edge), Frames(process=self._bus.process, events=(event,)))
        return CancelAnswer(job=job, told=edges)

    def _placing(self, job: Job) -> HeldJob:
        total = job.deadlines.total
        return HeldJob(
            job=job.job,
            state=State.SUBMITTED,
            model=job.model,
            tier=job.tier,
            lane=job.lane,
            attempt=job.attempt,
            age_s=round(total - self._edges.remaining(job.edge, job.deadlines, total), 3),
            edge=job.edge,
        )
