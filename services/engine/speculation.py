"""A scheduler's steps with drafts: which sequences guess ahead, and how far. What a guess is, `drafts` knows.

Must not know how drafts are computed or drawn. Invariant: a draft takes no block from anybody, and never passes the end that its
sequence has anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from services.engine.blocks import SequenceBlocks
from services.engine.drafts import allowed, propose
from services.engine.protocol import EngineInfo
from services.engine.scheduler import Chunk, ChunkedScheduler, Scheduler, Step
from services.engine.sequence import Sequence
from services.kv.pool import BlockPool
from services.settings.worker import WorkerSettings


def build_scheduler(settings: WorkerSettings, info: EngineInfo, pool: BlockPool) -> Scheduler:
    """What plans the steps of an engine with these settings."""
    plain = ChunkedScheduler(max_batch=settings.max_batch, max_tokens=settings.step_tokens, target_s=settings.step_target_s)
    if settings.speculative_tokens == 0:
        return plain
    return SpeculativeScheduler(plain, info, pool, settings.speculative_tokens)


class SpeculativeScheduler:
    """Plans as `scheduler` does; each decode row gets up to `most` guessed tokens beside it."""

    def __init__(self, scheduler: Scheduler, info: EngineInfo, pool: BlockPool, most: int) -> None:
        self._scheduler = scheduler
        self._context = info.context_length
        self._blocks = SequenceBlocks(info, pool)
        self._most = most

    @property
    def prompt_budget(self) -> int:
        return self._scheduler.prompt_budget

    def plan(self, sequences: Iterable[Sequence]) -> Step | None:
        step = self._scheduler.plan(sequences)
        if step is None:
            return None
        rows = sum(chunk.sequence.decoding for chunk in step.chunks)
        return Step(tuple(self._with_draft(chunk, rows) for chunk in step.chunks))

    def observe(self, step: Step, seconds: float) -> None:
        self._scheduler.observe(step, seconds)

    def _with_draft(self, chunk: Chunk, rows: int) -> Chunk:
        sequence = chunk.sequence
        if not (sequence.decoding and sequence.then_decode):
            return chunk
        wanted = min(
            allowed(sequence.draft_limit, rows, self._most),
            sequence.sampling.max_tokens - sequence.generated - 1,
            self._context - len(sequence.ids) - 1,
        )
        draft = propose(sequence.ids, wanted) if wanted > 0 else ()
        draft = draft[: self._blocks.reach(sequence, len(draft))]
        return replace(chunk, count=1 + len(draft), draft=draft) if draft else chunk
