"""What is known of a detached job that another edge began, and how it becomes a job of this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.reply import FinishReason, Logprob
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.choice import ChoiceTokens
from services.edge.jobs.draft import Draft


@dataclass(frozen=True, slots=True)
class Received:
    """What an earlier edge received of one choice."""

    tokens: list[int]
    logprobs: list[Logprob]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """`age` in seconds. `known_attempt` was made by an earlier edge, `next_attempt` by none, nor any above it.

    Compute in seconds: of attempts before the known one, and of that one.
    """

    job: str
    draft: Draft
    age: float
    known_attempt: int
    next_attempt: int
    choices: Sequence[Received]
    owned: bool
    weights: str
    deaths: int
    cached_tokens: int | None
    earlier_compute_s: float = 0.0
    run_compute_s: float = 0.0

    def active(self, edge: str, reply_to: str, wall: float) -> ActiveJob:
        """`wall`: now, in Unix seconds."""
        stamp = wall - self.age
        job = ActiveJob(self.job, self.draft, edge, reply_to, stamp, detached=True, attempt=self.next_attempt - 1)
        job.tokens.choices = [ChoiceTokens.kept(one.tokens, one.logprobs, one.finish) for one in self.choices]
        job.owned, job.weights, job.deaths, job.cached_tokens = self.owned, self.weights, self.deaths, self.cached_tokens
        job.inherit(self.earlier_compute_s, self.run_compute_s)
        job.submitted = job.admitted = True
        job.joining = self.known_attempt
        return job
