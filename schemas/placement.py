"""Router and workers: placements, reservations, answers; and what the edge hears of its submit."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.checks import require, require_process
from schemas.codec import Message
from schemas.explanation import Explanation
from schemas.job import Job
from schemas.numbers import Count, Random64, Seconds
from schemas.state import Credits

MAX_LEASE_ITEMS = 4096


class Accepted(Message, frozen=True, omit_defaults=True, kw_only=True, tag="accepted"):
    """Edge's answer: the run that was placed, and where. `prefill` is empty when decode prefills locally.

    `explanation`: of this and the other answers, when `Job.explain` asked for it.
    """

    run: Random64
    prefill: str
    decode: str
    router: str
    explanation: Explanation | None = None


NO_WORKER = "no_worker"
"""`Queue.reason`: nobody serves the model now, but somebody did until a moment ago."""


class Queue(Message, frozen=True, omit_defaults=True, kw_only=True, tag="queue"):
    """No credit, or others of the same or a higher tier wait: publish into the work queue."""

    router: str
    reason: str = "no_credit"
    explanation: Explanation | None = None


class Refused(Message, frozen=True, omit_defaults=True, kw_only=True, tag="refused"):
    """Not here and not now. `code` is an error code of `schemas.errors`; `retry_after` in seconds."""

    code: str
    reason: str
    retry_after: Seconds | None = None
    explanation: Explanation | None = None


SubmitAnswer = Accepted | Queue | Refused


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The first `blocks` full blocks of the prompt lie cached on `process`, a decode worker, as far as a router knows."""

    process: str
    blocks: Count

    def __post_init__(self) -> None:
        require_process(self.process, "process")


class Placement(Message, frozen=True, omit_defaults=True, kw_only=True):
    """Router to a worker's `.submit`. `decode` is the process that holds the reservation; empty = decode locally."""

    run: Random64
    job: Job
    decode: str = ""
    fetch: CachedBlocks | None = None

    def __post_init__(self) -> None:
        if self.decode:
            require_process(self.decode, "decode")


class Accept(Message, frozen=True, omit_defaults=True, kw_only=True, tag="accept"):
    """A worker took the work."""

    run: Random64
    credits: Credits


class Refuse(Message, frozen=True, omit_defaults=True, kw_only=True, tag="refuse"):
    """A worker has the last word."""

    run: Random64
    reason: str
    credits: Credits
    retry_after: Seconds | None = None


WorkerAnswer = Accept | Refuse


class LeaseVerb(StrEnum):
    RESERVE = "reserve"
    RENEW = "renew"
    RELEASE = "release"


class LeaseItem(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`blocks` and `suspect` matter to `reserve` only. `suspect`: the job's id, when it may kill its worker."""

    run: Random64
    verb: LeaseVerb
    blocks: Count = 0
    suspect: str = ""


class Lease(Message, frozen=True, omit_defaults=True, kw_only=True):
    """To `hr.decode.<id>.lease`; the items are answered one by one, in order."""

    process: str
    items: tuple[LeaseItem, ...]

    def __post_init__(self) -> None:
        require(len(self.items) <= MAX_LEASE_ITEMS, f"more than {MAX_LEASE_ITEMS} leases in one message")


class LeaseResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    run: Random64
    ok: bool
    reason: str = ""


class LeaseAnswer(Message, frozen=True, omit_defaults=True, kw_only=True):
    results: tuple[LeaseResult, ...]
    credits: Credits
