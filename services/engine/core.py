"""The step loop that the torch and the scripted engine share: runs arrive, move, compute and are cancelled, step after step.

Owns the sequences of one worker and their blocks' lives; a `Runner` computes. Knows no bus and no tensors.
Invariant: a block is released only when no step that may touch it is in progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from schemas.errors import InternalError, UnreadableMessage
from schemas.handoff import FirstToken
from services.clock import Clock
from services.engine.arrivals import Arrivals
from services.engine.blocks import SequenceBlocks
from services.engine.live import LiveRuns
from services.engine.progress import Progress
from services.engine.protocol import EngineInfo, EngineStats, OnStep, RunSpec, StepReport
from services.engine.residency import Move, Residency
from services.engine.runner import Failed, Runner
from services.engine.scheduler import Scheduler, Step, makes_way, turn
from services.engine.sequence import Sequence
from services.engine.statistics import StepStatistics
from services.kv.pool import BlockPool, LedgerError
from services.text.grammar_cache import GrammarCache

_LOOK_S = 0.02
_log = logging.getLogger(__name__)


class StepEngine:
    """Both phases over one pool, one scheduler and one runner."""

    def __init__(
        self,
        info: EngineInfo,
        pool: BlockPool,
        runner: Runner,
        scheduler: Scheduler,
        clock: Clock,
        grammars: GrammarCache | None = None,
    ) -> None:
        self.info = info
        self.pool = pool
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._blocks = SequenceBlocks(info, pool)
        self._runs = LiveRuns(pool)
        self._residency = Residency(pool, self._runs, self._blocks, clock)
        self._progress = Progress(info, self._runs, self._blocks)
        self._in_step: frozenset[Sequence] = frozenset()
        self._step_began = 0.0
        self._paused = False
        self._statistics = StepStatistics()
        self._wake = asyncio.Event()
        self._arrivals = Arrivals(info, self._blocks, grammars, clock, self._wake.set)
        self._task: asyncio.Task[None] | None = None
        self._on_step: OnStep | None = None

    # what a worker calls

    async def warm_up(self) -> None:
        """There is nothing that a first request would tell."""

    def start(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._task = asyncio.get_running_loop().create_task(self._loop(), name="engine")
        self._task.add_done_callback(_say_why_it_died)

    async def join(self) -> None:
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is None:
            return
        for sequence in self._runs.sequences():
            sequence.cancelled = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._runner.close()
        self._arrivals.close()
        self._runs.clear()
        self._task = None

    def prefill(self, spec: RunSpec, *, then_decode: bool = False) -> None:
        self._must_be_new(spec.run)
        self._add(self._arrivals.prefill(spec, then_decode=then_decode))

    def decode(
        self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float, opaque: bytes = b""
    ) -> None:
        if opaque:
            raise UnreadableMessage("this engine computes on the blocks it was given")
        self._must_be_new(spec.run)
        self._add(self._arrivals.decode(spec, first, cached_tokens=cached_tokens, compute_s=compute_s))

    def cancel(self, run: int, choices: Collection[int] | None = None) -> None:
        for sequence in self._runs.of(run):
            if sequence.drop(choices) and sequence not in self._in_step:
                self._runs.leave(sequence, sequence.ending)
                asyncio.get_running_loop().call_soon(self._report, StepReport())  # not after the step in progress

    def stats(self) -> EngineStats:
        sequences, now = self._runs.sequences(), self._clock.monotonic()
        prompts = [s for s in sequences if not s.decoding]
        in_turn = sorted((s for s in prompts if s.swapped_at is None), key=turn)
        # One that is half computed does not wait if its turn is next.
        waiting = [s for place, s in enumerate(in_turn) if (place or s.waiting) and s not in self._in_step]
        return self._statistics.snapshot(
            queued=len(waiting),
            queued_tokens=sum(s.uncomputed for s in waiting),
            running=sum(s.swapped_at is None for s in sequences) - len(waiting),
            backlog=sum(s.uncomputed for s in prompts),
            yielding=sum(s.uncomputed for s in prompts if makes_way(s, now)),
            yielding_queued=sum(makes_way(s, now) for s in waiting),
            swapped=len(self._residency.swapped()),
            step_tokens=self._scheduler.prompt_budget,
            in_step_s=now - self._step_began if self._in_step else 0.0,
        )

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._wake.set()

    # the runs

    def _must_be_new(self, run: int) -> None:
        if run in self._runs:
            raise LedgerError("this run computes here already")

    def _add(self, sequences: list[Sequence]) -> None:
        self._runs.put(sequences)
        self._wake.set()

    # the loop

    async def _loop(self) -> None:
        while True:
            self._runs.end_refused()
            move = None if self._paused else self._residency.settle()
            step = None if self._paused or move else self._scheduler.plan(self._residency.resident())
            if move is not None:
                await self._make(move)
            elif step is not None:
                self._report(await self._execute(step))
                await asyncio.sleep(0)  # a runner that never waits must not starve the bus
            else:
                self._report(StepReport())
                await self._something_new()

    async def _something_new(self) -> None:
        """Something is to be done, or may be: nobody says when blocks are free again that a swapped run waits for."""
        try:
            async with asyncio.timeout(_LOOK_S if self._residency.swapped() else None):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _make(self, move: Move) -> None:
        """A run's KV moves as if it were in a step: what is cancelled meanwhile ends afterwards."""
        self._in_step, self._step_began = frozenset(move.sequences), self._clock.monotonic()
        for _ in move.copies:
            await asyncio.sleep(0)
        self._in_step = frozenset()
        for sequence in move.sequences:
            if sequence.cancelled:
                self._runs.leave(sequence, sequence.ending)

    async def _execute(self, step: Step) -> StepReport:
        self._in_step = frozenset(chunk.sequence for chunk in step.chunks)
        started = self._step_began = self._clock.monotonic()
        try:
            for chunk in step.chunks:
                self._blocks.must_be_writable(chunk)
            outcomes = await self._runner.execute(step)
            if outcomes is not None and len(outcomes) != len(step.chunks):
                raise InternalError(f"{len(outcomes)} outcomes for {len(step.chunks)} chunks")
        except Exception:
            _log.exception("engine step failed")
            self._in_step = frozenset()
            return self._progress.apply(step, [Failed("engine_error")] * len(step.chunks), self._clock.monotonic() - started)
        seconds = self._clock.monotonic() - started
        self._in_step = frozenset()
        if outcomes is not None:
            self._scheduler.observe(step, seconds)
            self._statistics.observe(step, seconds)
        return self._progress.apply(step, outcomes, seconds)

    def _report(self, report: StepReport) -> None:
        ended = self._runs.take_ended()
        if self._on_step is not None and (report.tokens or report.prompts or report.prefilled or ended or report.seconds):
            preemptions = self._residency.take_preemptions()
            self._on_step(replace(report, ended=ended, preemptions=preemptions) if ended or preemptions else report)


def _say_why_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the engine's loop ended; this worker computes nothing any more", exc_info=task.exception())
