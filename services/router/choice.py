"""One look at one job: the worker that would be asked now, or what the job is told instead. Nothing comes of looking.

Must not know who looks: a dispatcher acts on it, an explainer tells it. So both say the same.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass
from random import Random

from schemas.errors import HeadraceError, ModelLoading
from schemas.job import Job
from schemas.placement import NO_WORKER, Refused
from services.router.admission import Left, Stays, TurnedAway, at_worker
from services.router.placement import Decision, Impossible, Local, NoCredit, Pair, Why, place
from services.router.placement_request import Request
from services.router.placement_workers import Pool
from services.router.view import View


@dataclass(frozen=True, slots=True)
class Choice:
    """`chosen`: by placement. `instead`: what the job is told; None: the chosen worker is asked."""

    chosen: Pair | Local | None
    instead: Stays | Refused | None

    @property
    def why(self) -> Why | None:
        return self.chosen.why if self.chosen is not None else None


def choose(
    view: View,
    pools: Collection[Pool],
    job: Job,
    request: Request,
    left: Left,
    random: Random,
    without: Set[str] = frozenset(),
) -> Choice:
    """For `job`, as `request` among the `pools` of its model; `left` until its deadlines; never one of `without`."""
    decision = place(pools, request, view.now(), random, without)
    if isinstance(decision, NoCredit):
        return Choice(None, Stays(decision.reason))
    if isinstance(decision, Impossible):
        return Choice(None, nobody(view, job, decision))
    assert decision.why is not None
    said = None if job.resume else at_worker(job.tier, decision.why, left)
    return Choice(decision, refused(said) if isinstance(said, TurnedAway) else said)


def nobody(view: View, job: Job, decision: Decision) -> Refused | Stays | None:
    """What a job hears that no worker could take, however idle: that waiting cannot help it, unless its model lost its last
    worker just now and may get another one. None: some could."""
    if not isinstance(decision, Impossible):
        return None
    if isinstance(decision.error, ModelLoading) and view.served_lately(job.model):
        return Stays(NO_WORKER)
    return refusal(decision.error)


def refusal(error: HeadraceError) -> Refused:
    """`error` as the edge hears it."""
    return Refused(code=error.code or "internal_error", reason=error.message, retry_after=error.retry_after)


def refused(away: TurnedAway) -> Refused:
    """`away` as the edge hears it."""
    return Refused(code=away.code, reason=away.reason, retry_after=away.retry_after)
