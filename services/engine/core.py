"""The step loop that the torch and the scripted engine share: admission, block growth, cancellation, one step after the other.

Owns the sequences of one worker and their blocks' lives; a `Runner` computes. Knows no bus and no tensors.
Invariant: a block is released only when no step that may touch it is in progress.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from dataclasses import replace

from schemas.errors import InternalError, InvalidRequest
from schemas.handoff import FirstToken
from schemas.lifecycle import State
from services.clock import Clock
from services.engine.admission import admit
from services.engine.blocks import SequenceBlocks
from services.engine.live import LiveRuns
from services.engine.progress import Progress
from services.engine.protocol import EngineInfo, EngineStats, OnStep, RunSpec, StepReport
from services.engine.runner import Failed, Runner
from services.engine.scheduler import Scheduler, Step, choose_victim
from services.engine.sequence import Sequence
from services.engine.statistics import StepStatistics
from services.kv.pool import BlockPool, LedgerError, PoolExhausted
from services.text.grammar_cache import Compiled, GrammarCache

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
        self._grammars = grammars
        self._blocks = SequenceBlocks(info, pool)
        self._runs = LiveRuns(pool)
        self._progress = Progress(info, self._runs, self._blocks)
        self._in_step: frozenset[Sequence] = frozenset()
        self._step_began = 0.0
        self._paused = False
        self._arrivals = itertools.count()
        self._statistics = StepStatistics()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._on_step: OnStep | None = None

    # what a worker calls

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
        if self._grammars is not None:
            self._grammars.close()
        self._runs.clear()
        self._task = None

    def prefill(self, spec: RunSpec, *, then_decode: bool = False) -> None:
        self._must_be_new(spec.run)
        admit(self.info, spec)
        sequence = Sequence.begin(spec, next(self._arrivals), then_decode)
        self._blocks.admit(sequence)
        sequence.grammar = self._compiling(spec)
        self._add([sequence])

    def decode(self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float) -> None:
        self._must_be_new(spec.run)
        admit(self.info, spec, first)
        sequence = Sequence.begin(spec, next(self._arrivals), then_decode=True)
        sequence.totals.cached_tokens, sequence.totals.compute_s = cached_tokens, compute_s
        self._blocks.adopt(sequence)
        sequence.grammar = self._compiling(spec)
        going = sequence.with_first(first)
        if not going:
            raise InvalidRequest("no choice goes on")
        if sequence.branching:
            self._blocks.branch(sequence, going)
        self._add(going)

    def cancel(self, run: int, choices: Collection[int] | None = None) -> None:
        for sequence in self._runs.of(run):
            if sequence.drop(choices) and sequence not in self._in_step:
                self._runs.leave(sequence, sequence.ending)
                asyncio.get_running_loop().call_soon(self._report, StepReport())  # not after the step in progress

    def stats(self) -> EngineStats:
        sequences = self._runs.sequences()
        waiting = [s for s in sequences if s.waiting and s not in self._in_step]
        return self._statistics.snapshot(
            queued=len(waiting),
            queued_tokens=sum(s.uncomputed for s in waiting),
            running=len(sequences) - len(waiting),
            backlog=sum(s.uncomputed for s in sequences if not s.decoding),
            step_tokens=self._scheduler.prompt_budget,
            in_step_s=self._clock.monotonic() - self._step_began if self._in_step else 0.0,
        )

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._wake.set()

    # admission

    def _must_be_new(self, run: int) -> None:
        if run in self._runs:
            raise LedgerError("this run computes here already")

    def _add(self, sequences: list[Sequence]) -> None:
        self._runs.put(sequences)
        self._wake.set()

    def _compiling(self, spec: RunSpec) -> asyncio.Future[Compiled] | None:
        """The run's grammar, compiled while its prompt is computed."""
        if spec.sampling.grammar is None or self._grammars is None:
            return None
        compiling = self._grammars.start(spec.sampling.grammar)
        compiling.add_done_callback(lambda _: self._wake.set())
        return compiling

    # the loop

    async def _loop(self) -> None:
        while True:
            step = None if self._paused else self._scheduler.plan(self._growable())
            if step is None:
                self._report(StepReport())
                await self._wake.wait()
                self._wake.clear()
                continue
            self._report(await self._execute(step))
            await asyncio.sleep(0)  # a runner that never waits must not starve the bus

    def _growable(self) -> list[Sequence]:
        """The sequences in order of arrival, each with blocks for its ids; what cannot grow is preempted.

        A run whose grammar was refused ends.
        """
        for sequence in self._runs.sequences():
            if (refusal := sequence.refusal) and self._runs.computes(sequence):
                self._runs.end(sequence.run, State.FAILED, refusal, InvalidRequest.code)
        for sequence in self._runs.sequences():
            self._grow(sequence)
        return self._runs.sequences()

    def _grow(self, sequence: Sequence) -> None:
        while self._runs.computes(sequence):
            try:
                self._blocks.grow(sequence)
                return
            except PoolExhausted:
                self._runs.end(choose_victim(self._runs.sequences()).run, State.RETRY, "preempted")

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
            self._on_step(replace(report, ended=ended))


def _say_why_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the engine's loop ended; this worker computes nothing any more", exc_info=task.exception())
