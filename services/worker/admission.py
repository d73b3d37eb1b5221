"""Whether a worker can take a run: what every phase asks before it begins one. Workers have the last word.

Must not know how a run is computed. Invariant: a run that is refused has changed nothing here.
"""

from __future__ import annotations

from schemas.job import Job, Tier
from services.engine.protocol import RunSpec
from services.kv.hashing import cap_hit
from services.worker.worker import Worker


def refusal(worker: Worker, run: int, job: Job, *, begun: bool = False) -> str:
    """Why a run cannot begin here, "" when it can: what every phase checks first. `begun`: another worker hands it on."""
    if worker.beats.draining:
        return "draining"
    if worker.isolates or (worker.suspects and not job.suspect):
        return "isolating"
    if job.model != worker.engine.info.model:
        return "wrong_model"
    if job.weights and job.weights != worker.engine.info.weights:
        return "other_weights"
    if worker.runs.cancelled_early(run) or (worker.edges.gone(job.edge) and not (begun and job.detached)):
        return "cancelled"
    if worker.runs.known(run):
        return "duplicate"
    if worker.edges.remaining(job.edge, job.deadlines, job.deadlines.total) <= 0:
        return "expired"
    return ""


def queue_refusal(worker: Worker, job: Job, to_fetch: int = 0) -> str:
    """A worker queues one step's work at most; an idle queue takes any prompt. What is cached here is no work, nor are
    the first `to_fetch` tokens, which are said to be cached elsewhere.
    """
    stats = worker.engine.stats()
    queued = worker.beats.queued_tokens(stats)
    if job.tier is Tier.ENTERPRISE and stats.queued == stats.yielding_queued:
        queued -= stats.queued_tokens  # all of them make way for it
    room = stats.step_tokens - queued
    tokens = job.prompt_tokens + sum(len(choice.generated) for choice in job.open_choices)
    if not queued or tokens - to_fetch <= room or tokens - _cached_tokens(worker, job) <= room:
        return ""
    return "no_credit"


def _cached_tokens(worker: Worker, job: Job) -> int:
    if job.sampling.prompt_logprobs is not None:
        return 0  # it needs every token of its prompt computed
    info, spec = worker.engine.info, RunSpec.of(0, job)
    hashes = spec.hashes(info)[: cap_hit(len(spec.trunk), info.block_tokens)]
    return len(worker.engine.pool.prefix.match(hashes)) * info.block_tokens
