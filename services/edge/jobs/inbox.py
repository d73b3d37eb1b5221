"""What arrives about jobs: frames, events, digests, deaths, queue reports; each finds its job and moves it on.

Owns nothing; sees the supervisor's table. Invariant: a message of a run that was not adopted is answered with a cancel. The first
half of this file runs for every token of every stream, so it does little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schemas.errors import Unavailable
from schemas.lifecycle import State
from schemas.reply import BY_OPERATOR, Digest, DigestEntry, Event, Frame, Frames
from schemas.state import Cause, Death, QueueReport
from services.bus.interface import Msg
from services.edge.jobs.active import ActiveJob, AttemptEnd
from services.edge.jobs.ends import end_of
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.peers import Peers, Word
from services.edge.jobs.recovery import Recovery
from services.edge.jobs.strangers import Strangers
from services.edge.jobs.timing import Timing
from services.edge.jobs.vigil import Vigil
from services.edge.jobs.wire import Wire

COMPUTES = frozenset({State.PREFILLING, State.DECODING})


class Inbox:
    """`ended` is called with the name of a job that an operator ended elsewhere."""

    def __init__(
        self,
        jobs: Mapping[str, ActiveJob],
        wire: Wire,
        strangers: Strangers,
        recovery: Recovery,
        board: ModelBoard,
        peers: Peers,
        vigil: Vigil,
        timing: Timing,
        ended: Callable[[str], object],
    ) -> None:
        self._jobs = jobs
        self._wire = wire
        self._strangers = strangers
        self._recovery = recovery
        self._board = board
        self._peers = peers
        self._vigil = vigil
        self._timing = timing
        self._ended = ended

    def on_reply(self, reply: Frames | Digest, msg: Msg) -> None:
        if type(reply) is Digest:
            self._digest(reply, self._peers.worker(reply.process, digest=not reply.continued), msg.reply)
            return
        assert type(reply) is Frames
        word = self._peers.worker(reply.process)
        for frame in reply.frames:
            self._frame(frame, word, msg.reply)
        for event in reply.events:
            self._event(event, word, msg.reply)

    def on_position(self, answer: Digest, control: str) -> None:
        """Where one run stands: its owner was asked. It is no digest, whose silence about other runs would be a sign."""
        self._digest(answer, self._peers.worker(answer.process), control)

    def _frame(self, frame: Frame, word: Word, control: str) -> None:
        job = self._jobs.get(frame.job)
        if job is None or not job.adopts(frame.attempt, frame.run):
            self._refuse(job, frame, control)
            return
        self._heard(job, frame.hop, word)
        if frame.choice in job.tokens.stopped and frame.finish is None:
            self._strangers.refuse(frame.run, frame.job, control, frame.choice)
        elif job.take(frame):
            job.mailbox.wake()
            if frame.finish is not None and job.tokens.complete:
                job.end_attempt(None)
        else:
            self._recovery.ask(job)

    def _event(self, event: Event, word: Word, control: str) -> None:
        job = self._jobs.get(event.job)
        if event.state is State.CANCELLED and event.reason == BY_OPERATOR and (job is not None or not event.run):
            self._ended(event.job)
        if event.hop == 0:
            self._router_event(event, job)
        elif job is not None and job.adopts(event.attempt, event.run):
            if event.hop < job.hop and event.state.terminal:
                return  # somebody further on owns the run
            self._heard(job, event.hop, word)
            job.reach(event)
            if event.state is State.FINISHED and not job.tokens.complete and not job.closed:
                job.tokens.final = True
                self._recovery.ask(job)
            elif event.state.terminal:
                job.end_attempt(end_of(event))
        elif not event.state.terminal:
            self._refuse(job, event, control)

    def _router_event(self, event: Event, job: ActiveJob | None) -> None:
        """A router gives up an attempt that nobody owns."""
        if job is not None and event.attempt == job.attempt and not job.hop and job.run in (0, event.run):
            job.reach(event)
            if event.state.terminal:
                job.end_attempt(end_of(event))

    def _heard(self, job: ActiveJob, hop: int, word: Word) -> None:
        """The adopted run is alive at `hop`, as its process just said."""
        if hop == job.hop:
            job.word = word
        elif hop > job.hop:  # else somebody further on owns the run
            job.word = word
            job.own(hop, word)
            if cause := self._peers.cause(word.process):
                self._bereave(job, cause)  # it said so before it died, and that came late
            elif job.closed:
                self._wire.cancel_owners(job)
            else:
                job.mailbox.wake()

    def _digest(self, digest: Digest, word: Word, control: str) -> None:
        """What it says and we have not heard is asked for, if it does not come by itself."""
        for entry in digest.runs:
            job = self._jobs.get(entry.job)
            if job is None or not job.adopts(entry.attempt, entry.run):
                if not entry.state.terminal:
                    self._refuse(job, entry, control)
                continue
            self._heard(job, entry.hop, word)
            if entry.hop == job.hop:
                tokens = job.tokens
                tokens.final = tokens.final or entry.state is State.FINISHED
                tokens.ended = tokens.ended or entry.state.terminal
                tokens.expect(entry.last)
                if digest.stalled and entry.state in COMPUTES:
                    self._vigil.stalled(job)
                if tokens.wanting:
                    self._recovery.ask(job, self._timing.repeat_s)

    def _refuse(self, job: ActiveJob | None, record: Frame | Event | DigestEntry, control: str) -> None:
        if job is None or not job.joining:
            self._strangers.refuse(record.run, record.job, control)

    def on_queue_report(self, report: QueueReport, _: Msg) -> None:
        dialect = self._wire.bus.dialect
        dialect.hear(report.router, report.schemas)
        if report.card is not None:
            dialect.hear(report.router, report.card.schemas, about=report.model)
        self._board.hear(report)
        self._peers.router(report.router)

    def on_death(self, death: Death, _: Msg) -> None:
        """Who left ended its runs before; what it said of them may have been lost."""
        if death.cause is Cause.DISCONNECTED:
            self._vigil.disconnected(death.process)
            return
        self._peers.gone(death.process, death.cause)
        self._wire.bus.dialect.gone(death.process)
        for job in self._jobs.values():
            if job.in_charge == death.process:
                self._bereave(job, death.cause)

    def _bereave(self, job: ActiveJob, cause: Cause) -> None:
        """Who was in charge of the job is gone."""
        if not job.over.done():
            # Of a resumed job also who accepted it: a worker may die of it before its *owned* is out.
            job.deaths += (job.hop > 0 or job.owned) and cause.proven
            job.end_attempt(AttemptEnd("death", Unavailable("A worker failed.", retry_after=1.0)))
