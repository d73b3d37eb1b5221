"""The choices of one request as a job each, for engines that compute one choice a run, read as one job.

Owns how a draft is taken apart, and which choices are still read. Must not know text, limits or routers. Invariants: choice k is
the only choice of job k, whose seed depends on the request's and on k alone; nothing that a job handed out is lost, whenever its
reader gives up; the first job that fails fails the whole.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from schemas.explanation import Explanation
from schemas.reply import Logprob
from services.edge.api.ports import Handle
from services.edge.jobs.draft import Delta, Draft
from services.edge.jobs.handle import JobCancelled

_PATIENCE_S = 3600.0


def take_apart(draft: Draft) -> list[Draft]:
    """One draft a choice."""
    seeds = [_seed(draft.sampling.seed, choice) for choice in range(draft.n)]
    return [replace(draft, n=1, sampling=structs.replace(draft.sampling, seed=seed)) for seed in seeds]


def _seed(seed: int, choice: int) -> int:
    """The first choice keeps the request's, so that it is what a request of one choice would get."""
    if not choice:
        return seed
    data = seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"hr-choice").digest(), "little")


class Apart:
    """A `Handle`. `handles`: of the jobs, in order of their choices."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._open = set(range(len(handles)))
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._unread: list[Delta] = []
        self._failure: Exception | None = None

    @property
    def id(self) -> str:
        """The first one's; what was used is booked under it."""
        return self._handles[0].id

    @property
    def explanation(self) -> Explanation | None:
        """Of where the first one was placed."""
        return self._handles[0].explanation

    @property
    def began(self) -> bool:
        return any(handle.began for handle in self._handles)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, which is counted once: what not even one job had to compute."""
        return min(handle.cached_tokens for handle in self._handles)

    @property
    def compute_s(self) -> float:
        return sum(handle.compute_s for handle in self._handles)

    @property
    def done(self) -> bool:
        return all(handle.done for handle in self._handles)

    @property
    def prompt_logprobs(self) -> Sequence[Logprob]:
        """They all compute the same; whoever has handed out a token has them whole."""
        return max((handle.prompt_logprobs for handle in self._handles), key=len)

    async def admitted(self) -> None:
        """All of them, or none: raises the first refusal."""
        try:
            await asyncio.gather(*(handle.admitted() for handle in self._handles))
        except BaseException:
            self.cancel()
            raise

    async def next(self, timeout: float) -> list[Delta]:
        """As of one job of several choices."""
        if not self._unread and self._failure is None:
            for choice in self._open - self._reading.keys():
                self._reading[choice] = asyncio.ensure_future(self._read(choice))
            if self._reading:
                await asyncio.wait(self._reading.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None and not self._unread:
            self.cancel()
            raise self._failure
        news, self._unread = self._unread, []
        return news

    def stop(self, choice: int) -> None:
        """Its job has nothing else to do."""
        self._open.discard(choice)
        if choice in self._reading:
            self._reading.pop(choice).cancel()
        self._handles[choice].cancel()

    def cancel(self) -> None:
        self._failure = self._failure or JobCancelled()
        for choice in range(len(self._handles)):
            self.stop(choice)

    async def _read(self, choice: int) -> None:
        """One look at one job. It goes on while nobody waits for it, so it keeps what it finds."""
        try:
            news = await self._handles[choice].next(_PATIENCE_S)
        except Exception as error:
            self._failure = self._failure or error
            return
        finally:
            self._reading.pop(choice, None)
        self._unread += [structs.replace(delta, choice=choice) for delta in news]
        if any(delta.finish is not None for delta in news):
            self._open.discard(choice)
