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
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Accept, Refuse
from schemas.reply import BY_OPERATOR, OWNED, Event
from schemas.state import Role
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock
from services.engine.protocol import Engine, TokenOutput
from services.telemetry.metrics import Metrics
from services.worker.beats import Beats
from services.worker.edges import EdgeWatch
from services.worker.frames import token_frame
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
        ending = (State.CANCELLED, BY_OPERATOR)
        self.drop(run, *ending)
        run.ending = ending  # also of a run that was stopping already

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
