"""What operators ask and are told of jobs and of refused requests (`hr.admin.<service>.<id>.jobs|cancel|quarantine`), as JSON.

Never a prompt, a token, a tenant's name or a cache salt: a lane is all that is said of a tenant.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from schemas.job import Tier
from schemas.lifecycle import State

MOST = 1000
"""Entries of one answer; the rest is asked for with `after`."""


class PageQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`after`: the `next` of the page before. `older_s`: only what is at least so old."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 100
    after: str = ""
    older_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class HeldJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job that a process holds. `age_s` since its edge made it, None = not known here.

    `run`: 16 hex digits, "" = none. `worker`: who computes it, `edge`: who answers for it; "" = nobody, or not known here.
    """

    job: str
    state: State
    model: str
    tier: Tier
    lane: int
    attempt: int = 0
    age_s: float | None = None
    run: str = ""
    worker: str = ""
    edge: str = ""


class JobsPage(msgspec.Struct, frozen=True, kw_only=True):
    """In order of job ids. `total` of what was asked for; `next` "" = this was the last page."""

    process: str
    jobs: list[HeldJob]
    total: int
    next: str = ""


class CancelQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str


class WorkerQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which worker a router shall leave out, or take back: its process id."""

    worker: str


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`told`: the edges that were told; empty when this process ended the job itself."""

    job: str
    told: list[str] = []


class QuarantineQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`clear`: a hash, or "all"; "" = only list. `limit` and `after` as in `PageQuestion`."""

    clear: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 100
    after: str = ""


class QuarantinePage(msgspec.Struct, frozen=True, kw_only=True):
    """`held`: keyed content hashes that are refused, with the seconds left. `cleared`: what this question lifted."""

    held: dict[str, float]
    total: int
    cleared: list[str] = []
    next: str = ""
