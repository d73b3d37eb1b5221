"""A scripted engine over real blocks, whose every block is checked before each step that reads it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from schemas.state import Capabilities
from services.clock import ManualClock
from services.engine.core import StepEngine
from services.engine.protocol import EngineInfo, OnStep, RunSpec, StepReport, TokenOutput
from services.engine.runner import Outcome
from services.engine.scheduler import ChunkedScheduler, Step
from services.engine.scripted import ScriptedRunner, Timing
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from services.kv.swap import SwapSpace
from services.text.grammar_cache import GrammarCache
from tests.waiting import until

BLOCK = 4


def scripted_info(block_tokens: int, **changes: Any) -> EngineInfo:
    """What a small scripted engine is, whose end of sequence is 0; with `changes`."""
    info = EngineInfo(
        name="scripted",
        version="1",
        model="m",
        weights="w",
        kv_compat="k",
        capabilities=Capabilities(),
        context_length=256,
        vocab_size=100,
        block_tokens=block_tokens,
        eos_ids=frozenset({0}),
        step_tokens=32,
        max_batch=8,
    )
    return replace(info, **changes)


class Careful(ScriptedRunner):
    """Compares all KV that a step reads with what its tokens make. While `open` is not set a step is in progress.

    The step before which `stop_when` becomes true clears it, once.
    """

    def __init__(self, pool: BlockPool, **options: Any) -> None:
        super().__init__(pool, **options)
        self.pool = pool
        self.open = asyncio.Event()
        self.open.set()
        self.in_step = False
        self.computed = 0
        self.stop_when: Callable[[], bool] = lambda: False

    async def execute(self, step: Step) -> list[Outcome] | None:
        for chunk in step.chunks:
            fingerprint, blocks = 0, chunk.sequence.blocks
            for position in range(chunk.start):
                fingerprint = xxhash.xxh3_64_intdigest(struct.pack("<QI", fingerprint, chunk.sequence.ids[position]))
                (kept,) = struct.unpack_from("<Q", self.pool.view(blocks[position // BLOCK]), position % BLOCK * 8)
                assert kept == fingerprint, f"token {position} of run {chunk.sequence.run}"
        self.computed += sum(chunk.count for chunk in step.chunks)
        self.in_step = True
        if self.stop_when():
            self.stop_when = lambda: False
            self.open.clear()
        await self.open.wait()
        self.in_step = False
        return await super().execute(step)


class Scripted:
    """A started scripted engine that draws at random, by (seed, choice, index). `watch` is called with each report."""

    def __init__(
        self,
        blocks: int = 200,
        *,
        cache: bool = True,
        step_s: float = 0.0,
        max_batch: int = 8,
        swap: int = 0,
        grammars: GrammarCache | None = None,
        watch: OnStep | None = None,
    ) -> None:
        memory = memoryview(bytearray(blocks * BLOCK * 8))
        self.pool = BlockPool(
            blocks, block_bytes=BLOCK * 8, memory=memory, prefix=prefix_cache(enabled=cache), swap=SwapSpace(swap)
        )
        timing = Timing(decode_step_s=step_s)
        self.runner = Careful(self.pool, block_tokens=BLOCK, vocab=range(10, 90), eos_id=0, timing=timing)
        self.clock = ManualClock()
        info = scripted_info(BLOCK, capabilities=Capabilities(n=True), max_batch=max_batch)
        scheduler = ChunkedScheduler(max_batch=max_batch, max_tokens=32, chunk_tokens=8)
        self.engine = StepEngine(info, self.pool, self.runner, scheduler, self.clock, grammars)
        self.reports: list[StepReport] = []
        self._watch = watch

    def _on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        if self._watch is not None:
            self._watch(report)

    async def __aenter__(self) -> Scripted:
        self.engine.start(self._on_step)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()
        self.pool.check_integrity()

    def outputs(self, run: int) -> list[TokenOutput]:
        return [output for report in self.reports for output in report.tokens if output.run == run]

    def tokens(self, run: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for output in self.outputs(run):
            found.setdefault(output.choice, []).append(output.token)
        return found

    def end(self, run: int) -> State | None:
        return next((end.state for report in self.reports for end in report.ended if end.run == run), None)

    async def ended(self, *runs: int) -> None:
        await until(lambda: all(self.end(run) for run in runs), what=f"the end of {runs}")

    async def local(self, spec: RunSpec) -> dict[int, list[int]]:
        self.engine.prefill(spec, then_decode=True)
        await self.ended(spec.run)
        assert self.end(spec.run) is State.FINISHED
        return self.tokens(spec.run)

    async def prefilled(self, spec: RunSpec) -> tuple[FirstToken, ...]:
        self.engine.prefill(spec)
        await until(lambda: any(spec.run in report.prefilled for report in self.reports))
        return tuple(FirstToken(choice=o.choice, index=o.index, token=o.token, finish=o.finish) for o in self.outputs(spec.run))


def job(run: int, prompt: Sequence[int], *choices: tuple[int, ...] | None, **sampling: Any) -> RunSpec:
    """Choice i has generated `choices[i]`; None: it is done."""
    open_ = tuple(Choice(index=i, generated=ids) for i, ids in enumerate(choices) if ids is not None)
    return RunSpec(run, tuple(prompt), open_, Sampling(**{"seed": 5, "max_tokens": 11} | sampling))
