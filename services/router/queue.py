"""The queue path: which waiting job is tried next, and when. Several models at once, one job of a model at a time.

Owns the turn of tiers and lanes; must not know how a job is placed. Everything of JetStream runs in tasks of its own, so that
a queue that is slow or down never touches the fast path. Invariant: a job is pulled only while a worker with credit is in view,
or once, to see whether a queue that did not answer does again: then it goes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from contextlib import suppress
from random import Random

from schemas.errors import BusUnavailable
from schemas.subjects import Subjects, name_token
from services.bus.work_queue import Item, WorkQueue
from services.clock import Clock
from services.router.entry import Entry
from services.router.lanes import Tiers, charge, next_turn, note
from services.router.placement import Local, Pair, place
from services.router.placement_request import Request
from services.router.precedence import Precedence
from services.router.pulled import Pulled
from services.router.tasks import Tasks
from services.router.view import View
from services.router.waiting import Lanes, Waiting
from services.telemetry.logs import AtMost, fields

EXPECTING_S = 0.01
"""Between two looks for a job that was just told to queue: it is on its way."""
SHORT = Request(tokens=1)
"""What a job is at least: whoever has no credit for it has none at all."""
_log = logging.getLogger(__name__)


class QueuePath:
    """Polls what waits, and gives it to workers with credit."""

    def __init__(
        self,
        queue: WorkQueue,
        subjects: Subjects,
        view: View,
        waiting: Waiting,
        pulled: Pulled,
        precedence: Precedence,
        entry: Entry,
        clock: Clock,
        random: Random,
        poll_s: float,
    ) -> None:
        self._queue = queue
        self._subjects = subjects
        self._view = view
        self._waiting = waiting
        self._pulled = pulled
        self._precedence = precedence
        self._entry = entry
        self._clock = clock
        self._random = random
        self._poll_s = poll_s
        self._wakes: dict[str, asyncio.Event] = {}
        self._tiers: dict[str, Tiers] = {}
        self._tasks = Tasks()
        self._stopping = False
        self._may_log = AtMost(clock.monotonic)

    def wake(self, model: str) -> None:
        """Look now: a credit appeared, or a job was told to queue."""
        if model not in self._wakes and not self._stopping:
            wake = self._wakes[model] = asyncio.Event()
            self._tasks.spawn(self._empty(model, wake), f"queue of {model}")
        if model in self._wakes:
            self._wakes[model].set()

    async def poll(self) -> None:
        """Counts what waits, for as long as the router lives."""
        while True:
            since = self._clock.monotonic()
            try:
                self._waiting.counted(await self._queue.waiting(self._subjects.jobs()), since)
                self._entry.counted()
            except BusUnavailable as error:
                self._unreachable(error)
            some = self._waiting.models()
            for model in self._wakes:
                if name_token(model) in some:
                    self.wake(model)
            await asyncio.sleep(self._poll_s)

    def begin(self) -> None:
        """Pull from now on, also after `finish`."""
        self._stopping = False

    async def finish(self, timeout: float) -> None:
        """Pull no more; let the jobs in hand end."""
        self._stopping = True
        for wake in self._wakes.values():
            wake.set()
        await self._tasks.finish(timeout)
        self._wakes.clear()

    async def _empty(self, model: str, wake: asyncio.Event) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPECTING_S if self._waiting.expecting(model) else self._poll_s):
                    await wake.wait()
            wake.clear()
            try:
                await self._round(model)
            except BusUnavailable as error:
                self._unreachable(error)
            except Exception:  # one job that upsets us must not stop the others; it comes back after the queue's ack wait
                _log.exception("a queued job could not be handled")

    async def _round(self, model: str) -> None:
        """One job after another while credit is in view. A lane whose first job nobody takes is passed over in this round."""
        passed: set[tuple[str, int]] = set()
        while not self._stopping and (self._waiting.stuck(model) or self._credit(model)):
            lanes, now = self._waiting.lanes(model), self._clock.monotonic()
            self._tiers[model] = note(self._tiers.get(model, {}), lanes, now)
            turn = next_turn(self._tiers[model], _without(lanes, passed), now)
            if turn is None:
                return
            if self._precedence.resumes_first(model, turn.tier, SHORT):
                passed.add((turn.tier, turn.lane))
                continue
            item = await self._pull(model, turn.tier, turn.lane)
            tokens = await self._pulled.settle(item) if item is not None else None
            if tokens is None:
                passed.add((turn.tier, turn.lane))
            else:
                self._tiers[model] = charge(turn.tiers, turn.tier, turn.lane, tokens)

    async def _pull(self, model: str, tier: str, lane: int) -> Item | None:
        try:
            item = await self._queue.pull(f"{self._subjects.lane(model, tier, lane)}.*", f"{name_token(model)}_{tier}_{lane}")
        except BusUnavailable:
            self._waiting.pulled(model, False)
            raise
        self._waiting.pulled(model, True)
        return item

    def _credit(self, model: str) -> bool:
        """Somebody would take a short job."""
        return isinstance(place(self._view.pools(model), SHORT, self._view.now(), self._random), Pair | Local)

    def _unreachable(self, error: BusUnavailable) -> None:
        if self._may_log() is not None:
            _log.warning("the queue cannot be reached", extra=fields(error=error))


def _without(lanes: Lanes, passed: Set[tuple[str, int]]) -> Lanes:
    return {tier: {lane: jobs for lane, jobs in of_tier.items() if (tier, lane) not in passed} for tier, of_tier in lanes.items()}
