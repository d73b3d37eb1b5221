"""The Job that is submitted for the current attempt of a job."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.job import Choice, Deadlines, Job
from services.edge.jobs.active import ActiveJob


def job_message(active: ActiveJob) -> Job:
    """A resume has neither a queue nor a first-token deadline, and asks for no more of its prompt than is missing."""
    draft, limits, sampling, tokens = active.draft, active.draft.limits, active.draft.sampling, active.tokens
    if sampling.prompt_logprobs is not None and tokens.prompt.complete:
        sampling = replace(sampling, prompt_logprobs=None)
    return Job(
        job=active.id,
        attempt=active.attempt,
        model=draft.model,
        prompt=draft.prompt,
        sampling=sampling,
        deadlines=Deadlines(
            stamp=active.stamp,
            total=limits.total_s,
            queue=None if active.owned else limits.queue_s,
            first_token=None if active.owned else limits.first_token_s,
        ),
        reply_to=active.reply_to,
        edge=active.edge,
        n=draft.n,
        choices=tuple(
            Choice(index=index, generated=tuple(choice.tokens), done=choice.finish is not None)
            for index, choice in enumerate(tokens.choices)
        ),
        tier=draft.tier,
        lane=draft.lane,
        salt=draft.salt,
        detached=active.detached,
        resume=active.owned,
        deaths=active.deaths,
        weights=active.weights,
        explain=bool(draft.explain) and not active.owned,
        adapter=draft.adapter,
    )
