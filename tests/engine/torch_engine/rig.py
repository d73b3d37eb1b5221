"""Torch engines that run, what they report, and a handoff between two by copying bytes."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.handoff import FirstToken
from services.engine.core import StepEngine
from services.engine.protocol import RunEnd, RunSpec, StepReport, TokenOutput
from services.kv.holders import RunHolder
from tests.waiting import until


class Running:
    """An engine that is started; `reports` is all it said."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.reports: list[StepReport] = []

    async def __aenter__(self) -> Running:
        self.engine.start(self.reports.append)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()
        self.engine.pool.check_integrity()

    def outputs(self, run: int) -> list[TokenOutput]:
        return [output for report in self.reports for output in report.tokens if output.run == run]

    def tokens(self, run: int) -> list[int]:
        return [output.token for output in self.outputs(run)]

    def end(self, run: int) -> RunEnd | None:
        return next((end for report in self.reports for end in report.ended if end.run == run), None)

    async def prefilled(self, run: int) -> FirstToken:
        """The first token of a run that waits for its handoff."""
        await until(lambda: any(run in report.prefilled for report in self.reports), 60, f"prefill of {run}")
        first = self.outputs(run)[0]
        return FirstToken(choice=0, index=first.index, token=first.token, logprob=first.logprob)

    async def ended(self, *runs: int) -> None:
        await until(lambda: all(self.end(run) for run in runs), 100, f"the end of {runs}")

    async def generate(self, *specs: RunSpec) -> list[list[int]]:
        """What each gets when all are sent at once and prefilled here."""
        for spec in specs:
            self.engine.prefill(spec, then_decode=True)
        await self.ended(*(spec.run for spec in specs))
        return [self.tokens(spec.run) for spec in specs]


def copy_blocks(source: StepEngine, target: StepEngine, run: int) -> Sequence[int]:
    """What a transfer does: the run's blocks, byte for byte, into blocks of the other pool."""
    blocks = source.pool.blocks(RunHolder(run))
    into = target.pool.allocate(RunHolder(run), len(blocks))
    for here, there in zip(blocks, into, strict=True):
        target.pool.view(there)[:] = source.pool.view(here)
    source.pool.release(RunHolder(run))
    return into
