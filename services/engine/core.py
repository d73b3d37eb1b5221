"""The step loop that the torch and the scripted engine share: admission, block growth, cancellation, finish.

Owns the sequences of one worker and their blocks' lives; a `Runner` computes. Knows no bus and no tensors.
Invariant: a block is released only when no step that may touch it is in progress.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence as Outcomes

from schemas.errors import InternalError
from schemas.handoff import FirstToken
from schemas.lifecycle import State
from services.clock import Clock
from services.engine.admission import admit
from services.engine.blocks import SequenceBlocks
from services.engine.protocol import EngineInfo, EngineStats, OnStep, RunEnd, RunSpec, StepReport, TokenOutput
from services.engine.runner import Failed, Outcome, Runner, Sampled
from services.engine.scheduler import Scheduler, Step, choose_victim
from services.engine.sequence import Sequence
from services.engine.statistics import StepStatistics
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool, LedgerError, PoolExhausted

_log = logging.getLogger(__name__)


class StepEngine:
    """Both phases over one pool, one scheduler and one runner."""

    def __init__(self, info: EngineInfo, pool: BlockPool, runner: Runner, scheduler: Scheduler, clock: Clock) -> None:
        self.info = info
        self.pool = pool
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._blocks = SequenceBlocks(info, pool)
        self._sequences: dict[int, Sequence] = {}
        self._in_step: frozenset[int] = frozenset()
        self._ended: list[RunEnd] = []
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
        for sequence in self._sequences.values():
            sequence.cancelled = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._runner.close()
        for run in list(self._sequences):
            self._drop(run)
        self._task = None

    def prefill(self, spec: RunSpec, *, then_decode: bool = False) -> None:
        self._must_be_new(spec.run)
        choice, ids = admit(self.info, spec)
        sequence = Sequence(spec, choice.index, ids, (), next(self._arrivals), then_decode)
        self._blocks.admit(sequence)
        self._add(sequence)

    def decode(self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float) -> None:
        self._must_be_new(spec.run)
        choice, ids = admit(self.info, spec, first)
        blocks = self.pool.blocks(RunHolder(spec.run))
        if len(blocks) < self._blocks.needed(len(ids) - 1):
            raise LedgerError(f"a run of {len(ids) - 1} computed tokens came with {len(blocks)} blocks")
        sequence = Sequence(spec, choice.index, ids, blocks, next(self._arrivals), then_decode=True)
        sequence.computed = len(ids) - 1
        sequence.cached_tokens, sequence.compute_s = cached_tokens, compute_s
        self._blocks.seal(sequence)
        self._add(sequence)

    def cancel(self, run: int) -> None:
        sequence = self._sequences.get(run)
        if sequence is None:
            return
        sequence.cancelled = True
        if run not in self._in_step:
            self._end(run, State.CANCELLED)
            asyncio.get_running_loop().call_soon(self._report, StepReport())  # not after the step in progress

    def stats(self) -> EngineStats:
        waiting = [s for s in self._sequences.values() if s.waiting and s.run not in self._in_step]
        return self._statistics.snapshot(
            queued=len(waiting),
            queued_tokens=sum(s.uncomputed for s in waiting),
            running=len(self._sequences) - len(waiting),
            step_tokens=self._scheduler.prompt_budget,
        )

    # admission

    def _must_be_new(self, run: int) -> None:
        if run in self._sequences:
            raise LedgerError("this run computes here already")

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.run] = sequence
        self._wake.set()

    # the loop

    async def _loop(self) -> None:
        while True:
            step = self._scheduler.plan(self._growable())
            if step is None:
                self._report(StepReport())
                await self._wake.wait()
                self._wake.clear()
                continue
            self._report(await self._execute(step))
            await asyncio.sleep(0)  # a runner that never waits must not starve the bus

    def _growable(self) -> list[Sequence]:
        """The sequences in order of arrival, each with a block for its next token; what cannot grow is preempted."""
        for sequence in list(self._sequences.values()):
            if sequence.run in self._sequences and sequence.decoding:
                self._grow(sequence)
        return list(self._sequences.values())

    def _grow(self, sequence: Sequence) -> None:
        while sequence.run in self._sequences:
            try:
                self._blocks.grow(sequence)
                return
            except PoolExhausted:
                self._end(choose_victim(self._sequences.values()).run, State.RETRY, "preempted")

    async def _execute(self, step: Step) -> StepReport:
        self._in_step = frozenset(chunk.sequence.run for chunk in step.chunks)
        started = self._clock.monotonic()
        try:
            for chunk in step.chunks:
                self._blocks.must_be_writable(chunk)
            outcomes = await self._runner.execute(step)
            if outcomes is not None and len(outcomes) != len(step.chunks):
                raise InternalError(f"{len(outcomes)} outcomes for {len(step.chunks)} chunks")
        except Exception:
            _log.exception("engine step failed")
            self._in_step = frozenset()
            return self._apply(step, [Failed("engine_error")] * len(step.chunks), self._clock.monotonic() - started)
        seconds = self._clock.monotonic() - started
        self._in_step = frozenset()
        if outcomes is not None:
            self._scheduler.observe(step, seconds)
            self._statistics.observe(step, seconds)
        return self._apply(step, outcomes, seconds)

    def _apply(self, step: Step, outcomes: Outcomes[Outcome] | None, seconds: float) -> StepReport:
        tokens: list[TokenOutput] = []
        prefilled: list[int] = []
        total = sum(chunk.count for chunk in step.chunks)
        for position, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            sequence.compute_s += seconds * chunk.count / total
            if sequence.cancelled:
                self._end(sequence.run, State.CANCELLED)
                continue
            if outcomes is None:
                continue
            outcome = outcomes[position]
            if isinstance(outcome, Failed):
                self._end(sequence.run, State.FAILED, outcome.reason)
                continue
            sequence.computed += chunk.count
            self._blocks.seal(sequence)
            if outcome is not None:
                (drawn,) = outcome
                tokens.append(self._append(sequence, drawn, prefilled))
        return StepReport(tuple(tokens), tuple(prefilled), seconds=seconds)

    def _append(self, sequence: Sequence, drawn: Sampled, prefilled: list[int]) -> TokenOutput:
        sequence.ids.append(drawn.token)
        finish = sequence.finish_after_last(self.info.eos_ids, self.info.context_length)
        if finish is not None:
            self._end(sequence.run, State.FINISHED)
        elif not sequence.then_decode:
            del self._sequences[sequence.run]  # the worker holds its blocks until they are handed off
            prefilled.append(sequence.run)
        return TokenOutput(
            run=sequence.run,
            choice=sequence.choice,
            index=sequence.generated - 1,
            token=drawn.token,
            logprob=drawn.logprob,
            finish=finish,
            cached_tokens=sequence.cached_tokens,
            compute_s=sequence.compute_s,
        )

    # the end of a run

    def _end(self, run: int, state: State, reason: str = "") -> None:
        self._drop(run)
        self._ended.append(RunEnd(run, state, reason))

    def _drop(self, run: int) -> None:
        del self._sequences[run]
        self.pool.release(RunHolder(run))

    def _report(self, report: StepReport) -> None:
        ended, self._ended = tuple(self._ended), []
        if self._on_step is not None and (report.tokens or report.prefilled or ended or report.seconds):
            self._on_step(StepReport(report.tokens, report.prefilled, ended, report.seconds))


def _say_why_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the engine's loop ended; this worker computes nothing any more", exc_info=task.exception())
