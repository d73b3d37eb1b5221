"""A runner that computes nothing: the next token is the last one plus one, unless a test says otherwise.

Where several choices begin, each adds its own index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling, Tier
from schemas.state import Capabilities
from services.clock import ManualClock
from services.engine.core import StepEngine
from services.engine.protocol import EngineInfo, OnStep, RunEnd, RunSpec, StepReport, TokenOutput
from services.engine.runner import Outcome, Sampled
from services.engine.scheduler import Chunk, ChunkedScheduler, Step
from services.engine.sequence import TRUNK
from services.engine.sequence import Sequence as EngineSequence
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix import PrefixCache
from tests.waiting import until

EOS = 99
VOCAB = 100
BLOCK_TOKENS = 4
CONTEXT = 64

Answer = Callable[[Step], Sequence[Outcome] | None]


def count_up(step: Step) -> list[Outcome]:
    return [_next(chunk.sequence) if chunk.samples else None for chunk in step.chunks]


def _next(sequence: EngineSequence) -> tuple[Sampled, ...]:
    fork = sequence.choice == TRUNK
    return tuple(Sampled((sequence.ids[-1] + 1 + fork * choice) % VOCAB) for choice in sequence.drawing)


@dataclass
class FakeRunner:
    """While `open` is not set a step is in progress and stays so. Each step takes `seconds` of `clock`."""

    clock: ManualClock
    seconds: float = 0.01
    answer: Answer = count_up
    open: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[tuple[Chunk, ...]] = field(default_factory=list)
    closed: bool = False
    in_step: bool = False

    async def execute(self, step: Step) -> Sequence[Outcome] | None:
        for chunk in step.chunks:  # what a real one would read and write
            assert len(chunk.sequence.blocks) * BLOCK_TOKENS >= chunk.start + chunk.count
        self.steps.append(step.chunks)
        self.in_step = True
        await self.open.wait()
        self.in_step = False
        self.clock.advance(self.seconds)
        return self.answer(step)

    async def close(self) -> None:
        self.closed = True


class Rig:
    """A started engine over `blocks` blocks, and everything it reported."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        paused: bool = False,
        max_batch: int = 8,
        max_tokens: int = 32,
        on_step: OnStep | None = None,
        prefix: PrefixCache | None = None,
        n: bool = True,
    ) -> None:
        clock = ManualClock()
        self.runner = FakeRunner(clock)
        if not paused:
            self.runner.open.set()
        self.pool = BlockPool(blocks, prefix=prefix)
        self.reports: list[StepReport] = []
        info = EngineInfo(
            name="fake",
            version="1",
            model="m",
            weights="w",
            kv_compat="k",
            capabilities=Capabilities(n=n),
            context_length=CONTEXT,
            vocab_size=VOCAB,
            block_tokens=BLOCK_TOKENS,
            eos_ids=frozenset({EOS}),
            step_tokens=max_tokens,
            max_batch=max_batch,
        )
        scheduler = ChunkedScheduler(max_batch=max_batch, max_tokens=max_tokens, target_s=1.0, chunk_tokens=4)
        self.engine = StepEngine(info, self.pool, self.runner, scheduler, clock)
        self.engine.start(on_step or self.reports.append)

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.runner.open.set()
        await self.engine.stop()
        self.pool.check_integrity()

    @property
    def outputs(self) -> list[TokenOutput]:
        return [output for report in self.reports for output in report.tokens]

    @property
    def ends(self) -> dict[int, RunEnd]:
        found: dict[int, RunEnd] = {}
        for report in self.reports:
            for end in report.ended:
                assert end.run not in found, "a run ended twice"
                found[end.run] = end
        return found

    def tokens(self, run: int, choice: int = 0) -> list[int]:
        mine = [output for output in self.outputs if (output.run, output.choice) == (run, choice)]
        assert [output.index for output in mine] == [mine[0].index + i for i in range(len(mine))] if mine else True
        return [output.token for output in mine]

    def holds(self, run: int) -> int:
        return len(self.pool.blocks(RunHolder(run)))

    async def ended(self, *runs: int) -> None:
        await until(lambda: self.ends.keys() >= set(runs), what=f"the end of {runs}")


def spec(
    run: int, prompt: Sequence[int] = (1, 2, 3), *, generated: tuple[int, ...] = (), tier: Tier = Tier.PAID, **sampling: Any
) -> RunSpec:
    settings = Sampling(**{"seed": 1, "max_tokens": 5} | sampling)
    return RunSpec(run, tuple(prompt), (Choice(index=0, generated=generated),), settings, tier)


def several(run: int, prompt: Sequence[int], *choices: tuple[int, ...], **sampling: Any) -> RunSpec:
    """A run whose choices 0, 1, … have generated these ids."""
    settings = Sampling(**{"seed": 1, "max_tokens": 5} | sampling)
    open_ = tuple(Choice(index=index, generated=generated) for index, generated in enumerate(choices))
    return RunSpec(run, tuple(prompt), open_, settings)


def first(token: int, index: int = 0) -> tuple[FirstToken, ...]:
    return (FirstToken(choice=0, index=index, token=token),)
