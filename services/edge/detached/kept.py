"""One detached job that this edge holds, and how much of it is in the database already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.job import pack_ids
from services.edge.jobs.active import ActiveJob
from services.edge.store.records import Checkpoint, Chunk, Data, End, Facts, JobState


@dataclass(slots=True, eq=False)
class Kept:
    """`valid_until`: when our lease may end; `told_at`: when its owner last heard that we hold it (both monotonic seconds).

    `written`: tokens in the database, by choice; `ended`: choices whose finish is there. `over`: called with the tokens that it
    used, as far as is known here, when it is held here no more.
    """

    job: ActiveJob
    valid_until: float
    told_at: float
    written: list[int]
    over: Callable[[int], None]
    ended: set[int] = field(default_factory=set)

    def checkpoint(self, *, release: bool = False) -> Checkpoint:
        """What is new. Nothing changes here before `saved`."""
        job = self.job
        facts = Facts(
            attempt=job.attempt,
            claimed=job.claimed_attempt,
            deaths=job.deaths,
            owner=job.in_charge,
            owned=job.owned,
            weights=job.weights,
            cached_tokens=job.cached_tokens,
            compute_s=job.compute_s,
            run_compute_s=job.run_compute_s,
        )
        chunks = tuple(chunk for index in range(len(job.tokens.choices)) if (chunk := self._chunk(index)) is not None)
        return Checkpoint(job.id, facts, chunks, self._end(), release)

    def saved(self, checkpoint: Checkpoint, valid_until: float) -> None:
        """The database has it."""
        self.valid_until = valid_until
        for chunk in checkpoint.chunks:
            self.written[chunk.choice] = chunk.first + chunk.count
            if chunk.data.finish is not None:
                self.ended.add(chunk.choice)

    @property
    def used_tokens(self) -> int:
        return self.job.draft.prompt_tokens + self.job.tokens.received()

    def _chunk(self, index: int) -> Chunk | None:
        choice, first = self.job.tokens.choices[index], self.written[index]
        tokens = choice.tokens[first:]
        finish = choice.finish if index not in self.ended else None
        if not tokens and finish is None:
            return None
        return Chunk(index, first, Data(tokens=pack_ids(tokens), logprobs=tuple(choice.logprobs[first:]), finish=finish))

    def _end(self) -> End | None:
        job = self.job
        if job.tokens.complete:
            return End(JobState.FINISHED)
        if not job.closed or job.given_up:
            return None
        if job.error is None:
            return End(JobState.CANCELLED)
        return End(JobState.FAILED, job.error.code or "internal_error", job.error.message)
