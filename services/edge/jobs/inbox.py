"""What arrives about jobs: frames, events, digests, deaths, queue reports; each finds its job and moves it on.

Owns nothing; sees the supervisor's table. Invariant: a message of a run that was not adopted is answered with a cancel. The first
half of this file runs for every token of every stream, so it does little.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.errors import Unavailable
from schemas.lifecycle import State
from schemas.reply import Digest, Event, Frame, Frames
from schemas.state import Death, QueueReport
from services.bus.interface import Msg
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.ends import end_of
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.recovery import Recovery
from services.edge.jobs.strangers import Strangers
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire


class Inbox:
    def __init__(
        self,
        jobs: Mapping[str, ActiveJob],
        wire: Wire,
        strangers: Strangers,
        recovery: Recovery,
        board: ModelBoard,
        timing: Timing,
    ) -> None:
        self._jobs = jobs
        self._wire = wire
        self._strangers = strangers
        self._recovery = recovery
        self._board = board
        self._timing = timing

    def on_reply(self, reply: Frames | Digest, msg: Msg) -> None:
        if type(reply) is Digest:
            self._digest(reply)
            return
        assert type(reply) is Frames
        for frame in reply.frames:
            self._frame(frame, reply.process, msg.reply)
        for event in reply.events:
            self._event(event, reply.process, msg.reply)

    def _frame(self, frame: Frame, process: str, control: str) -> None:
        job = self._jobs.get(frame.job)
        if job is None or not job.adopts(frame.attempt, frame.run):
            self._strangers.refuse(frame.run, frame.job, control)
            return
        if frame.hop > job.hop:
            self._owned(job, frame.hop, process)
        if job.take(frame):
            job.mailbox.wake()
            if frame.finish is not None and job.complete:
                job.end_attempt(None)
        else:
            self._recovery.ask(job)

    def _event(self, event: Event, process: str, control: str) -> None:
        job = self._jobs.get(event.job)
        if event.hop == 0:
            self._router_event(event, job)
        elif job is not None and job.adopts(event.attempt, event.run):
            if event.hop < job.hop and event.state.terminal:
                return  # somebody further on owns the run
            self._owned(job, event.hop, process)
            job.reach(event)
            if event.state is State.FINISHED and not job.complete and not job.closed:
                job.final = True
                self._recovery.ask(job)
            elif event.state.terminal:
                job.end_attempt(end_of(event))
        elif not event.state.terminal:
            self._strangers.refuse(event.run, event.job, control)

    def _router_event(self, event: Event, job: ActiveJob | None) -> None:
        """A router gives up an attempt that nobody owns."""
        if job is not None and event.attempt == job.attempt and not job.hop and job.run in (0, event.run):
            job.reach(event)
            if event.state.terminal:
                job.end_attempt(end_of(event))

    def _owned(self, job: ActiveJob, hop: int, process: str) -> None:
        job.own(hop, process)
        if job.closed:
            self._wire.cancel_owners(job)
        else:
            job.mailbox.wake()

    def _digest(self, digest: Digest) -> None:
        """The tail of a run that is missing here is asked for, if it does not come by itself."""
        for entry in digest.runs:
            job = self._jobs.get(entry.job)
            if job is not None and job.run == entry.run and job.hop:
                job.final = job.final or entry.state is State.FINISHED
                job.expect(entry.last)
                if job.missing():
                    self._recovery.ask(job, self._timing.repeat_s)

    def on_queue_report(self, report: QueueReport, _: Msg) -> None:
        self._board.hear(report)

    def on_death(self, death: Death, _: Msg) -> None:
        if not death.cause.proven:
            return
        for job in self._jobs.values():
            if not job.over.done() and job.in_charge == death.process:
                job.deaths += 1 if job.hop else 0
                job.end_attempt(AttemptEnd("death", Unavailable("A worker failed.", retry_after=1.0)))
