"""The table of jobs this edge answers for: start, deadlines, close.

Owns each job from `start` until it is closed and its compute has ended. Invariants: every job is closed once; a closed job is
cancelled until that is confirmed, also after its consumer left; a job without a consumer computes nothing, unless it is detached:
then whoever holds its row decides (`services.edge.detached`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

from schemas.control import CancelAck
from schemas.errors import EdgeUnavailable, HeadraceError, InternalError, OwnersDied, Quarantined
from schemas.identity import job_id
from schemas.reply import Reply
from schemas.state import Death, ModelCard, QueueReport
from schemas.subjects import Subjects
from services.bus.interface import Bus, Subscription
from services.bus.typed import Refusals, listen
from services.bus.work_queue import WorkQueue
from services.clock import Clock
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.beats import Beats
from services.edge.jobs.canceller import Canceller
from services.edge.jobs.deadlines import Deadlines
from services.edge.jobs.draft import Draft
from services.edge.jobs.handle import JobHandle
from services.edge.jobs.held import Held
from services.edge.jobs.inbox import Inbox
from services.edge.jobs.inherited import Inherited
from services.edge.jobs.life import JobLife
from services.edge.jobs.models import ModelBoard
from services.edge.jobs.peers import Peers
from services.edge.jobs.recovery import Recovery
from services.edge.jobs.rejoin import Rejoin
from services.edge.jobs.requeue import Requeue
from services.edge.jobs.strangers import Strangers
from services.edge.jobs.submission import Submission
from services.edge.jobs.timing import Timing
from services.edge.jobs.vigil import Vigil
from services.edge.jobs.wire import Wire
from services.edge.quarantine import Quarantine
from services.telemetry.metrics import Metrics

Life = Callable[[], Coroutine[Any, Any, None]]
_SPARED_S = 120.0
"""Long after whoever took a job over has its owner's ear, or nobody computes it any more."""
_log = logging.getLogger("headrace.edge")


class Supervisor:
    def __init__(
        self,
        bus: Bus,
        queue: WorkQueue,
        subjects: Subjects,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        timing: Timing | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._quarantine = quarantine or Quarantine(clock)
        self._timing = timing or Timing()
        self._clock = clock
        self._random = random
        self._bus = bus
        self._refusals = Refusals(metrics, clock)
        self._wire = Wire(bus, subjects)
        self.models = ModelBoard(clock, bus, self._timing)
        self._canceller = Canceller(self._wire, self.models, self._timing)
        submission = Submission(self._wire, queue, self.models, self._timing)
        self._life = JobLife(self._wire, submission, self.models, self._timing, random, metrics)
        self._beats = Beats(bus, subjects, clock, self._timing.beat_s)
        self._jobs: dict[str, ActiveJob] = {}
        self._deadlines = Deadlines(self._close, self.models)
        self._strangers = strangers = Strangers(self._wire, clock, self._timing.repeat_s)
        self.held = Held(self._jobs, self._close, bus.process, clock)
        recovery = Recovery(self._wire, self._timing)
        peers = Peers(clock)
        self._requeue = Requeue(self._jobs, submission, self.models, bus)
        self._vigil = Vigil(self._jobs, peers, bus, clock, self._timing)
        self._inbox = Inbox(
            self._jobs, self._wire, strangers, recovery, self.models, peers, self._vigil, self._timing, self.held.ended
        )
        self._rejoin = Rejoin(self._wire, self._inbox, self._canceller, self._timing)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: dict[str, Callable[[], None]] = {}
        self._subscriptions: list[Subscription] = []

    def __len__(self) -> int:
        """Jobs whose compute may not have ended."""
        return len(self._jobs)

    @property
    def connected(self) -> bool:
        return self._bus.connected

    def card(self, model: str) -> ModelCard | None:
        """What can be served of `model` now, None when nothing can."""
        return self.models.card(model)

    def retry_after(self, model: str) -> float:
        """Seconds after which a request that found no capacity may find some."""
        return self.models.retry_after(model)

    async def open(self) -> None:
        """Begin to listen and to beat. Raises `Disconnected`."""
        subjects = self._wire.subjects
        self._subscriptions = [
            await listen(self._bus, self._wire.reply_to, Reply, self._inbox.on_reply, refusals=self._refusals),
            await listen(self._bus, self._wire.cancel_inbox, CancelAck, self._canceller.on_ack, refusals=self._refusals),
            await listen(self._bus, subjects.queue_any(), QueueReport, self._inbox.on_queue_report, refusals=self._refusals),
            await listen(self._bus, subjects.dead_any(), Death, self._inbox.on_death, refusals=self._refusals),
        ]
        self._spawn(self._beats.run())
        self._spawn(self._vigil.run())
        self._spawn(self._requeue.run())

    async def close(self, timeout: float) -> None:
        """Cancel what still runs, wait for it at most `timeout` seconds, say goodbye."""
        for job in list(self._jobs.values()):
            self._close(job, EdgeUnavailable("The server is shutting down.", retry_after=1.0))
        deadline = asyncio.get_running_loop().time() + timeout
        while self._jobs and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait(self._tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._beats.beat(left=True)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    # jobs

    def start(self, draft: Draft) -> JobHandle:
        """Submit a new job. What becomes of it is told by the handle. Raises `Quarantined`."""
        self.refuse_quarantined(draft)
        job = ActiveJob(job_id(self._random), draft, self._bus.process, self._wire.reply_to, self._clock.wall())
        self._begin(job, partial(self._life.run, job))
        return JobHandle(job, self._give_up, self._stop)

    def _begin(self, job: ActiveJob, life: Life, age: float = 0.0) -> None:
        self._jobs[job.id] = job
        driver = self._spawn(self._drive(job, life))
        call_off = self._deadlines.set(job, age)

        def release() -> None:
            driver.cancel()
            call_off()

        self._ends[job.id] = release

    # detached jobs

    def start_detached(self, job: str, draft: Draft) -> ActiveJob:
        """Submit a new job that outlives this edge; it has a row under the name `job`. Raises `Quarantined`."""
        self.refuse_quarantined(draft)
        active = ActiveJob(job, draft, self._bus.process, self._wire.reply_to, self._clock.wall(), detached=True)
        self._begin(active, partial(self._life.run, active))
        return active

    def take_over(self, inherited: Inherited) -> ActiveJob:
        """Go on with a job that another edge began."""
        job = inherited.active(self._bus.process, self._wire.reply_to, self._clock.wall())
        self._begin(job, partial(self._go_on, job), inherited.age)
        return job

    def hold(self, job: ActiveJob) -> None:
        """Tell its owner that it is still wanted."""
        self._wire.hold(job)

    def let_go(self, job: ActiveJob) -> None:
        """Another edge holds it, or may: it is not cancelled, and nothing more is said of it."""
        self._strangers.spare(job.id, _SPARED_S)
        if not job.closed:
            job.closed = job.given_up = True
            job.mailbox.wake()
            self._ends.pop(job.id)()
            del self._jobs[job.id]

    def cancel(self, job: ActiveJob) -> None:
        """Stop its compute; safe to call at any time, also after the end."""
        self._give_up(job)

    async def _go_on(self, job: ActiveJob) -> None:
        if not job.tokens.complete:
            await self._life.run(job, begun=await self._rejoin.run(job))

    def refuse_quarantined(self, draft: Draft) -> None:
        """Raises `Quarantined`."""
        if draft in self._quarantine:
            raise Quarantined("This request made the servers that worked on it fail. It is refused for some minutes.")

    # ends

    async def _drive(self, job: ActiveJob, life: Life) -> None:
        try:
            await life()
            self._close(job, None)
        except HeadraceError as error:
            if isinstance(error, OwnersDied):
                self._quarantine.add(job.draft)
            self._close(job, error)
        except Exception:
            _log.exception("a job's supervision failed")
            self._close(job, InternalError("Internal error."))

    def _give_up(self, job: ActiveJob) -> None:
        if not job.tokens.complete:
            self._close(job, None)

    def _stop(self, job: ActiveJob, choice: int) -> None:
        """Said once here, and again by `Strangers` for as long as the choice goes on."""
        if not job.closed and job.tokens.choices[choice].finish is None:
            job.tokens.stop(choice)
            self._wire.cancel_owners(job, (choice,))
            if job.tokens.complete:
                self._close(job, None)

    def _close(self, job: ActiveJob, error: HeadraceError | None) -> None:
        if job.closed:
            return
        job.closed = True
        job.error = error
        job.mailbox.wake()
        self._ends.pop(job.id)()
        if job.may_compute and not job.tokens.complete:
            job.await_confirmation()
            self._spawn(self._cancel(job))
        else:
            del self._jobs[job.id]

    async def _cancel(self, job: ActiveJob) -> None:
        try:
            await self._rejoin.settled(job)
            await self._canceller.cancel(job)
        finally:
            del self._jobs[job.id]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
