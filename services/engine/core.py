"""The step loop that the torch and the scripted engine share: admission, block growth, cancellation, finish.

Owns the sequences of one worker and their blocks' lives; a `Runner` computes. Knows no bus and no tensors.
Invariant: a block is released only when no step that may touch it is in progress.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import Protocol

from schemas.errors import UnsupportedParameter
from schemas.handoff import FirstToken
from schemas.job import Choice, Tier
from schemas.lifecycle import State
from schemas.reply import Logprob
from services.clock import Clock
from services.engine.protocol import EngineInfo, EngineStats, OnStep, RunEnd, RunSpec, StepReport, TokenOutput
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Sequence
from services.engine.statistics import StepStatistics
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool, PoolExhausted

_log = logging.getLogger(__name__)
_RANK = {Tier.ENTERPRISE: 0, Tier.PAID: 1, Tier.FREE: 2}


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for a chunk that samples."""

    token: int
    logprob: Logprob | None = None


class Runner(Protocol):
    """Computes one step. Blocks the event loop never; releases the GIL or awaits while it computes."""

    async def execute(self, step: Step) -> list[Sampled | None] | None:
        """One entry a chunk of `step`, a token where the chunk samples. None: every row was cancelled, nothing was computed."""

    async def close(self) -> None: ...


class StepEngine:
    """Both phases over one pool, one scheduler and one runner."""

    def __init__(self, info: EngineInfo, pool: BlockPool, runner: Runner, scheduler: Scheduler, clock: Clock) -> None:
        self.info = info
        self.pool = pool
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
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
        choice = self._only_choice(spec)
        ids = [*spec.prompt, *choice.generated]
        blocks = self._claim(spec.run, self._blocks_for(len(ids) + (1 if then_decode else 0)))
        self._add(Sequence(spec, choice.index, ids, blocks, next(self._arrivals), then_decode))

    def decode(self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float) -> None:
        choice = self._only_choice(spec)
        ids = [*spec.prompt, *choice.generated, first[0].token]
        blocks = self.pool.blocks(RunHolder(spec.run))
        sequence = Sequence(spec, choice.index, ids, blocks, next(self._arrivals), then_decode=True)
        sequence.computed = len(ids) - 1
        sequence.cached_tokens, sequence.compute_s = cached_tokens, compute_s
        self._add(sequence)

    def cancel(self, run: int) -> None:
        sequence = self._sequences.get(run)
        if sequence is None:
            return
        sequence.cancelled = True
        if run not in self._in_step:
            self._end(run, State.CANCELLED)
            self._wake.set()

    def stats(self) -> EngineStats:
        waiting = [s for s in self._sequences.values() if s.computed == 0 and s.run not in self._in_step]
        return self._statistics.snapshot(
            queued=len(waiting),
            queued_tokens=sum(s.uncomputed for s in waiting),
            running=len(self._sequences) - len(waiting),
            step_tokens=self._scheduler.prompt_budget,
        )

    # admission

    def _only_choice(self, spec: RunSpec) -> Choice:
        if len(spec.choices) != 1:
            raise UnsupportedParameter(f"{self.info.name} computes one choice a run", param="n")
        return spec.choices[0]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.info.block_tokens)

    def _claim(self, run: int, blocks: int) -> tuple[int, ...]:
        """The run's blocks: those it holds already (a reservation), grown to `blocks`. Raises `PoolExhausted`."""
        holder = RunHolder(run)
        held = len(self.pool.blocks(holder))
        if not held:
            self.pool.allocate(holder, blocks)
        elif held < blocks:
            self.pool.extend(holder, blocks - held)
        return self.pool.blocks(holder)

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
        while len(sequence.blocks) < self._blocks_for(len(sequence.ids)):
            try:
                self.pool.extend(RunHolder(sequence.run), 1)
                sequence.blocks = self.pool.blocks(RunHolder(sequence.run))
            except PoolExhausted:
                victim = max(self._sequences.values(), key=lambda s: (_RANK[s.spec.tier], s.arrival))
                self._end(victim.run, State.RETRY, "preempted")
                if victim is sequence:
                    return

    async def _execute(self, step: Step) -> StepReport:
        self._in_step = frozenset(chunk.sequence.run for chunk in step.chunks)
        started = self._clock.monotonic()
        try:
            sampled = await self._runner.execute(step)
        except Exception:
            _log.exception("engine step failed")
            self._in_step = frozenset()
            for chunk in step.chunks:
                self._end(chunk.sequence.run, State.FAILED, "engine_error")
            return StepReport()
        seconds = self._clock.monotonic() - started
        self._in_step = frozenset()
        if sampled is not None:
            self._scheduler.observe(step, seconds)
            self._statistics.observe(step, seconds)
        return self._apply(step, sampled, seconds)

    def _apply(self, step: Step, sampled: list[Sampled | None] | None, seconds: float) -> StepReport:
        tokens: list[TokenOutput] = []
        prefilled: list[int] = []
        total = sum(chunk.count for chunk in step.chunks)
        for chunk, drawn in zip(step.chunks, sampled or itertools.repeat(None), strict=False):
            sequence = chunk.sequence
            sequence.compute_s += seconds * chunk.count / total
            if sequence.cancelled:
                self._end(sequence.run, State.CANCELLED)
            elif sampled is not None:
                sequence.computed += chunk.count
                if drawn is not None:
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
