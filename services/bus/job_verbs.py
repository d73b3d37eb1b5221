"""`jobs` and `cancel` of one service process, as an operator asks for them: the question read, the answer cut into pages.

Must not know what holds the jobs. Invariant: an answer is bounded, however many jobs there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

from schemas.admin import CancelAnswer, CancelQuestion, HeldJob, JobsPage, PageQuestion
from services.bus.interface import Msg
from services.bus.micro_endpoint import Answer, ServiceHandler
from services.bus.questions import read

T = TypeVar("T")


def job_verbs(
    process: str, held: Callable[[], Iterable[HeldJob]], cancel: Callable[[str], CancelAnswer]
) -> dict[str, ServiceHandler]:
    """Handlers by verb. `cancel` is called with a job's id, and raises `NotFound` for one that is not here."""

    async def jobs(msg: Msg) -> Answer:
        return page(process, held(), read(msg.data, PageQuestion))

    async def end(msg: Msg) -> Answer:
        return cancel(read(msg.data, CancelQuestion).job)

    return {"jobs": jobs, "cancel": end}


def page(process: str, held: Iterable[HeldJob], asked: PageQuestion) -> JobsPage:
    """Those of `held` that come after the page before, as many as were asked for."""
    wanted = [one for one in held if not asked.older_s or (one.age_s is not None and one.age_s >= asked.older_s)]
    shown, more = cut(wanted, _key, asked.after, asked.limit)
    return JobsPage(process=process, jobs=shown, total=len(wanted), next=more)


def cut(items: Iterable[T], key: Callable[[T], str], after: str, limit: int) -> tuple[list[T], str]:
    """The first `limit` in order of their keys that come after `after`; the key of the last one, "" when there are no more."""
    rest = heapq.nsmallest(limit + 1, (item for item in items if key(item) > after), key=key)
    return rest[:limit], key(rest[limit - 1]) if len(rest) > limit else ""


def _key(held: HeldJob) -> str:
    return held.job + held.run
