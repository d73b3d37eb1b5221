"""One worker process without its phases: it admits runs, says what becomes of them, drops them when told to.

Owns the run table, the outbox and the heartbeat. What others say comes through `hearing`, what time does through `upkeep`; the
phases (`services.prefill`, `services.decode`) own how a run gets from one stage to the next. Invariant: every admitted run ends
with exactly one terminal event, or is handed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from schemas.control import Control, Verb
from schemas.errors import BusError, JobFailed
from schemas.job import Job, Tier
from schemas.lifecycle import State
from schemas.placement import Accept, Refuse
from schemas.reply import BY_OPERATOR, OWNED, Event
from schemas.state import Role
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock
from services.engine.protocol import Engine, RunSpec, StepReport, TokenOutput
from services.kv.hashing import cap_hit
from services.telemetry.metrics import Metrics
from services.worker.beats import Beats
from services.worker.edges import EdgeWatch
from services.worker.frames import by_choice, prompt_frame, token_frame
from services.worker.outbox import Outbox
from services.worker.replay import ReplayRing
from services.worker.runs import UNATTENDED_S, Run, RunTable
from services.worker.stalls import StallWatch
from services.worker.suspects import SuspectLine

_log = logging.getLogger(__name__)
RunHook = Callable[[Run], None]


class Worker:
    """`on_prefilled` is called for a run whose prompt is computed and whose blocks wait for a handoff; `on_end` before the
    terminal event of a run is sent; `on_unknown_cancel` for a cancel of a run that is not here."""

    def __init__(
        self, bus: Bus, subjects: Subjects, engine: Engine, role: Role, clock: Clock, metrics: Metrics, host: str = ""
    ) -> None:
        self.bus = bus
        self.subjects = subjects
        self.engine = engine
        self.role = role
        self.clock = clock
        self.metrics = metrics
        self.runs = RunTable(clock)
        self.ring = ReplayRing(clock)
        self.outbox = Outbox(bus, subjects.control(bus.process), self.ring, clock)
        self.edges = EdgeWatch(bus, clock)
        self.stalls = StallWatch(clock)
        self.suspects = SuspectLine(clock)
        self.beats = Beats(bus, subjects, engine, role, clock, self._decoding, self._to_come, self.stalls, host)
        self.on_prefilled: RunHook | None = None
        self.on_end: list[RunHook] = []
        self.on_unknown_cancel: list[Callable[[int], None]] = []
        self._run_left = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # admission

    def refusal(self, run: int, job: Job, *, begun: bool = False) -> str:
        """Why a run cannot begin here, "" when it can: what every phase checks first. `begun`: another worker hands it on."""
        if self.beats.draining:
            return "draining"
        if self.isolates or (self.suspects and not job.suspect):
            return "isolating"
        if job.model != self.engine.info.model:
            return "wrong_model"
        if job.weights and job.weights != self.engine.info.weights:
            return "other_weights"
        if self.runs.cancelled_early(run) or (self.edges.gone(job.edge) and not (begun and job.detached)):
            return "cancelled"
        if self.runs.known(run):
            return "duplicate"
        if self.edges.remaining(job.edge, job.deadlines, job.deadlines.total) <= 0:
            return "expired"
        return ""

    @property
    def isolates(self) -> bool:
        """A job that may kill this process is here, and must be alone."""
        return any(run.job.suspect for run in self.runs)

    def admit(self, run: int, job: Job, hop: int, state: State, stop: Callable[[], object], partner: str = "") -> Run:
        """Take the run and say *owned* before anything is computed."""
        self.edges.expect(job.edge)
        remaining = self.edges.remaining(job.edge, job.deadlines, job.deadlines.total)
        admitted = Run(run, job, hop, state, self.clock.monotonic() + remaining, stop, partner)
        self.runs.admit(admitted)
        self._event(admitted, state, reason=OWNED)
        self.outbox.flush()
        self.beats.changed()
        return admitted

    def queue_refusal(self, job: Job, to_fetch: int = 0) -> str:
        """A worker queues one step's work at most; an idle queue takes any prompt. What is cached here is no work, nor are
        the first `to_fetch` tokens, which are said to be cached elsewhere.
        """
        stats = self.engine.stats()
        queued = self.beats.queued_tokens(stats)
        if job.tier is Tier.ENTERPRISE and stats.queued == stats.yielding_queued:
            queued -= stats.queued_tokens  # all of them make way for it
        room = stats.step_tokens - queued
        tokens = job.prompt_tokens + sum(len(choice.generated) for choice in job.open_choices)
        if not queued or tokens - to_fetch <= room or tokens - self._cached_tokens(job) <= room:
            return ""
        return "no_credit"

    def accepted(self, run: int) -> Accept:
        return Accept(run=run, credits=self.beats.credits())

    def refused(self, run: int, reason: str) -> Refuse:
        return Refuse(run=run, reason=reason, credits=self.beats.credits())

    # what becomes of a run

    def advance(self, run: Run, state: State) -> None:
        """The run reached another stage; the edge hears of it with the next flush."""
        run.advance(state)
        self._event(run, state)

    def frame(self, run: Run, *outputs: TokenOutput) -> None:
        """The next tokens of one choice for the edge, one at least; sent with the next flush."""
        run.note(outputs[-1])
        self.outbox.frame(run.job.reply_to, token_frame(run, outputs))

    def end(self, run: Run, state: State, reason: str = "", code: str = "") -> None:
        """The run is over here; everything it held is released. Sent with the next flush.

        `code`: of the error the client gets, for a FAILED that is not our fault.
        """
        if self.runs.get(run.id) is not run:
            return
        run.advance(state)
        self.runs.end(run)
        for hook in self.on_end:
            hook(run)
        self._event(run, state, reason=reason, error_code=code or JobFailed.code if state is State.FAILED else "")
        if run.job.detached:
            self.ring.keep(run.id, UNATTENDED_S)  # whoever adopts the job may come as late as that
        self._left()

    def hand_on(self, run: Run, process: str) -> None:
        """Another process owns the run now; no event of ours ends the attempt."""
        self.runs.end(run, handed_to=process)
        self.ring.close(run.id)
        self._left()

    def drop(self, run: Run, state: State = State.CANCELLED, reason: str = "") -> None:
        """Stop the run at the stage it is in; it ends as `state` once the stage let go of it."""
        if not run.stopping:
            run.stopping = True
            run.ending = (state, reason)
            run.stop()

    def drop_by_operator(self, run: Run) -> None:
        """An operator ends the run, also one that was to go on elsewhere: the job goes on nowhere."""
        self.drop(run)
        run.ending = (State.CANCELLED, BY_OPERATOR)

    def on_step(self, report: StepReport) -> None:
        """What one engine step did, as the engine reports it."""
        for scored in report.prompts:
            run = self.runs.get(scored.run)
            if run is not None:
                self.outbox.frame(run.job.reply_to, prompt_frame(run, scored))
        for outputs in by_choice(report.tokens):
            run = self.runs.get(outputs[0].run)
            if run is not None:
                if run.state is State.PREFILLING and run.hop == 2:
                    run.advance(State.DECODING)
                elif run.state is State.HANDING_OFF and run.hop == 2:  # the engine has fetched its KV
                    self.advance(run, State.DECODING)
                self.frame(run, *outputs)
        for prefilled in report.prefilled:
            run = self.runs.get(prefilled)
            if run is not None and self.on_prefilled is not None:
                run.totals = report.prefilled[prefilled]
                self.on_prefilled(run)
        for ended in report.ended:
            run = self.runs.get(ended.run)
            if run is not None:
                state, reason = run.ending if ended.state is State.CANCELLED else (ended.state, ended.reason)
                self.end(run, state, reason, ended.code)
        self.outbox.flush()
        if self.outbox.full:
            self.engine.pause()  # `upkeep` resumes it
        if report.ended or report.prefilled:
            self.beats.changed()
        if report.preemptions:
            self.metrics.preemptions.add(report.preemptions)
        if report.seconds:
            self.metrics.engine_step_time.record(report.seconds)
        if report.drafted:
            self.metrics.draft_tokens.add(report.drafted)
            self.metrics.accepted_tokens.add(report.accepted)
        if report.unfetched:
            self.metrics.handoffs_unfetched.add(report.unfetched)

    def stop_choices(self, run: Run, choices: Collection[int]) -> None:
        """The edge wants no more of these; the run ends with its last one."""
        run.want_no_more(choices)
        self.engine.cancel(run.id, choices)

    def cancel_at(self, process: str, run: Run) -> None:
        """Tell another process to drop a run, for the reason for which it is dropped here."""
        by_operator = run.ending[1] == BY_OPERATOR
        self.tell(process, Control(run=run.id, job=run.job.job, verb=Verb.CANCEL, by_operator=by_operator))

    def tell(self, process: str, control: Control) -> None:
        """Say something to another process; a cancel that is lost is repeated by its edge."""
        try:
            send(self.bus, self.subjects.control(process), control)
        except BusError as error:
            _log.warning("%s was not told to %s run %d: %s", process, control.verb, control.run, error)

    # tasks

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of this worker; it is waited for, or cancelled, when the worker closes."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def stage(self, run: Run, work: Coroutine[Any, Any, None], stopped: RunHook, name: str) -> None:
        """A stage of a run that is a task: `run.stop` cancels it, and `stopped` ends the run if it was cancelled or broke.

        Not a handler inside the task: one that is cancelled before its first step never enters its own `try`.
        """
        task = self.spawn(work, name)
        run.stop = task.cancel

        def finish(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                if done.exception() is None:
                    return
                run.ending = (State.FAILED, "internal_error")
            stopped(run)
            self.outbox.flush()

        task.add_done_callback(finish)

    async def idle(self, timeout: float) -> bool:
        """True once no run is left, False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while len(self.runs):
                    await self.run_left()
        except TimeoutError:
            return False
        return True

    async def run_left(self) -> None:
        """Until a run ends, or is handed on."""
        self._run_left.clear()
        await self._run_left.wait()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.stop()

    # inside

    def _decoding(self) -> int:
        return sum(len(run.going) for run in self.runs if run.hop == 2)

    def _to_come(self) -> int:
        return sum(run.to_come for run in self.runs)

    def _cached_tokens(self, job: Job) -> int:
        if job.sampling.prompt_logprobs is not None:
            return 0  # it needs every token of its prompt computed
        info, spec = self.engine.info, RunSpec.of(0, job)
        hashes = spec.hashes(info)[: cap_hit(len(spec.trunk), info.block_tokens)]
        return len(self.engine.pool.prefix.match(hashes)) * info.block_tokens

    def _left(self) -> None:
        self._run_left.set()
        self.beats.changed()

    def _event(self, run: Run, state: State, *, reason: str = "", error_code: str = "") -> None:
        event = Event(
            run=run.id,
            job=run.job.job,
            attempt=run.job.attempt,
            hop=run.hop,
            state=state,
            reason=reason,
            error_code=error_code,
            weights=self.engine.info.weights,  # in each, because *owned* may be lost
        )
        self.outbox.event(run.job.reply_to, event)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
