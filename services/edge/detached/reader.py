"""One reader of a detached job, at any edge, from any index on.

Where the job is held, tokens are read from memory as they come; elsewhere from its row, so up to a checkpoint and a poll later. A
job that goes over to another edge in the middle changes nothing but that. Owns how far this reader is. Invariant: it gets each
token once, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemas.errors import Gone, HeadraceError, InvalidRequest, NotFound, StoreUnavailable
from schemas.job import unpack_ids
from schemas.reply import FinishReason, Logprob
from services.edge.detached.keeper import Keeper
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.draft import Delta, Draft
from services.edge.jobs.handle import JobCancelled
from services.edge.jobs.mailbox import Mailbox
from services.edge.store.jobs import JobStore
from services.edge.store.records import Chunk, JobState, Progress


def gone() -> Gone:
    return Gone("The answer was kept for some minutes after it was complete, and is gone now.")


def unknown() -> NotFound:
    return NotFound("There is no such job.")


def beyond() -> InvalidRequest:
    return InvalidRequest("The answer ends before this position.")


class DetachedReader:
    """Reads as a `JobHandle` does, but comes and goes: `cancel` ends the reading, not the job.

    `first` maps each of the job's choices to the index of the first token that is wanted.
    """

    def __init__(self, job: str, draft: Draft, first: Mapping[int, int], keeper: Keeper, store: JobStore, poll_s: float) -> None:
        self.id = job
        self.draft = draft
        self.cached_tokens = 0
        self.compute_s = 0.0
        self._next = dict(first)
        """Choices that go on, each with the index of its next token."""
        self._keeper = keeper
        self._store = store
        self._poll_s = poll_s
        self._mailbox = Mailbox()
        self._left = False

    @property
    def done(self) -> bool:
        """Every choice finished and was handed out."""
        return not self._next

    async def next(self, timeout: float) -> list[Delta]:
        """What is new; an empty list after `timeout` seconds without news, or after the end.

        Raises the `HeadraceError` that ended the job, once every token before it was handed out; `JobCancelled`; `Gone`,
        `NotFound`; `InvalidRequest` when the answer is shorter than what was asked for.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self.done:
            if self._left:
                raise JobCancelled
            job = self._keeper.live(self.id)
            if news := self._from_memory(job) if job is not None else await self._from_row():
                return news
            left = deadline - loop.time()
            if left <= 0:
                break
            await self._wait(job, left)
        return []

    def cancel(self) -> None:
        """The reader is gone."""
        self._left = True
        self._mailbox.wake()

    def stop(self, choice: int) -> None:
        """This reader needs no more of this choice."""
        self._next.pop(choice, None)

    async def _wait(self, job: ActiveJob | None, left: float) -> None:
        """For something new, at most until it is time to see where the job is held."""
        if job is not None:
            job.readers.add(self._mailbox)
        try:
            await self._mailbox.wait(min(left, self._poll_s))
        finally:
            if job is not None:
                job.readers.discard(self._mailbox)

    def _from_memory(self, job: ActiveJob) -> list[Delta]:
        self.cached_tokens, self.compute_s = job.cached_tokens or 0, job.compute_s
        news = []
        for choice, first in list(self._next.items()):
            has = job.tokens.choices[choice]
            if delta := self._take(choice, first, has.tokens, has.logprobs, has.finish):
                news.append(delta)
        if not news and not self.done and job.closed:
            raise job.error or JobCancelled()
        return news

    async def _from_row(self) -> list[Delta]:
        try:
            found = await self._store.read(self.id, self._next)
        except StoreUnavailable:
            return []  # later
        if found is None:
            raise unknown()
        if found.state is JobState.EXPIRED:
            raise gone()
        self.cached_tokens, self.compute_s = found.cached_tokens or 0, found.compute_s
        news = [delta for chunk in found.chunks if (delta := self._from_chunk(chunk)) is not None]
        if not news and found.state is not JobState.RUNNING:
            raise _end(found)
        return news

    def _from_chunk(self, chunk: Chunk) -> Delta | None:
        if chunk.choice not in self._next:
            return None
        first = self._next[chunk.choice] - chunk.first
        return self._take(chunk.choice, first, unpack_ids(chunk.data.tokens), chunk.data.logprobs, chunk.data.finish)

    def _take(
        self,
        choice: int,
        first: int,
        tokens: list[int],
        logprobs: list[Logprob] | tuple[Logprob, ...],
        finish: FinishReason | None,
    ) -> Delta | None:
        """From `tokens[first]` on, if there is anything."""
        if first < 0:
            return None
        news = tokens[first:]
        if not news and finish is None:
            return None
        if first > len(tokens):
            raise beyond()
        self._next[choice] += len(news)
        if finish is not None:
            del self._next[choice]
        return Delta(choice, news, finish, logprobs[first:])


def _end(found: Progress) -> HeadraceError | JobCancelled:
    if found.state is JobState.CANCELLED:
        return JobCancelled()
    return found.failure or beyond()
