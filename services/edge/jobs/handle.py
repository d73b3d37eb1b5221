"""What the HTTP layer holds of a job: tokens as they come, the end, and a way to give it up.

Invariant: after `cancel` nothing more comes, and the compute stops whatever becomes of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.explanation import Explanation
from schemas.reply import Logprob
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.draft import Delta

_LOOK_S = 10.0
"""Between two looks at a job that nobody says anything of."""


class JobCancelled(Exception):
    """The job was given up by its own caller."""


async def admitted(job: ActiveJob) -> None:
    """Returns once the job is accepted, queued or owned, or another edge holds it; when its caller asked why, not before the
    router has answered.

    Raises the `HeadraceError` that refused it; `JobCancelled`.
    """
    while not (job.given_up or (job.admitted and (job.answered or not job.draft.explain))):
        _raise_end(job)
        await job.mailbox.wait(_LOOK_S)


class JobHandle:
    def __init__(self, job: ActiveJob, cancel: Callable[[ActiveJob], None], stop: Callable[[ActiveJob, int], None]) -> None:
        self._job = job
        self._cancel = cancel
        self._stop = stop

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def explanation(self) -> Explanation | None:
        """Of where it was placed, as far as its caller asked and may see it."""
        return self._job.explanation

    @property
    def began(self) -> bool:
        """A worker has taken it: from here on it computes."""
        return self._job.owned

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt did not compute, as far as is known."""
        return self._job.cached_tokens or 0

    @property
    def compute_s(self) -> float:
        """Seconds of compute of all attempts, as far as workers have said."""
        return self._job.compute_s

    @property
    def prompt_logprobs(self) -> Sequence[Logprob]:
        """Of the prompt's tokens from the second on, if the job asked for them: all are here before any token is handed out."""
        return self._job.tokens.prompt.logprobs

    async def admitted(self) -> None:
        """As the function."""
        await admitted(self._job)

    async def next(self, timeout: float) -> list[Delta]:
        """What is new, one `Delta` a choice; an empty list after `timeout` seconds without news, or after the end.

        Raises the `HeadraceError` that ended the job, once every token received before it was handed out; `JobCancelled`.
        """
        while True:
            if news := self._job.tokens.unread():
                return news
            if self._job.tokens.complete:
                return []
            _raise_end(self._job)
            if not await self._job.mailbox.wait(timeout):
                return []

    @property
    def done(self) -> bool:
        """Every choice finished and was handed out."""
        return self._job.tokens.complete and all(choice.reported for choice in self._job.tokens.choices)

    def cancel(self) -> None:
        """Stop the compute; safe to call at any time, also after the end."""
        self._cancel(self._job)

    def stop(self, choice: int) -> None:
        """Nothing more is needed of this choice; the others go on."""
        self._stop(self._job, choice)


def _raise_end(job: ActiveJob) -> None:
    if job.closed and not job.tokens.complete:
        raise job.error or JobCancelled()
