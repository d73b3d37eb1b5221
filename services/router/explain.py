"""Where a job goes and why, or why not: `hr.admin.router.<id>.explain`, and the answer to a submit that asks (`Job.explain`).

Must not decide anything: it asks what decides, in the order in which a submit does. Invariant: nothing is placed, and nothing
comes of asking.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from schemas.explanation import MOST, Candidate, Explanation, PassedOver, Terms
from schemas.job import Job
from schemas.placement import Accepted, Queue, Refused
from schemas.state import Role
from services.clock import Clock
from services.router.admission import Stays
from services.router.choice import choose, refused
from services.router.dispatch import Outcome
from services.router.entry import Entry
from services.router.placement import Pair, Why
from services.router.placement_request import PATIENCE_S, Request
from services.router.placement_survey import Candidates, survey
from services.router.placement_workers import Pool, Worker
from services.router.precedence import Precedence
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.question import read_question
from services.router.view import View


@dataclass(frozen=True, slots=True)
class Sight:
    """What a router saw of the workers when a job came. `left_out`: candidates that are not listed."""

    candidates: tuple[Candidate, ...]
    passed_over: list[PassedOver]
    left_out: int


class Explainer:
    """`router`: our own process."""

    def __init__(
        self, router: str, view: View, index: PrefixIndex, entry: Entry, precedence: Precedence, clock: Clock, random: Random
    ) -> None:
        self._router = router
        self._view = view
        self._index = index
        self._entry = entry
        self._precedence = precedence
        self._clock = clock
        self._random = random

    def answer(self, data: bytes) -> Explanation:
        """Raises `UnreadableMessage`."""
        return self.explain(read_question(data, self._clock.wall(), self._random))

    def explain(self, job: Job) -> Explanation:
        """What would become of `job` now, as new work."""
        return self.tell(self.look(job), self._ask(job))

    def look(self, job: Job) -> Sight:
        """Before `job` is placed: afterwards the view has it."""
        pools, request = self._request(job)
        found = [survey(pool, request, self._view.now(), frozenset()) for pool in pools]
        candidates, left_out, seen = list[Candidate](), 0, set[str]()
        for one in found:
            for does in ("prefill", "decode", "alone", "tail"):
                ready: Candidates = getattr(one, does)
                seen.update(worker.process for _, worker in ready)
                candidates += _named(ready, does, request, one.pool.block_tokens)
                left_out += max(0, len(ready) - MOST)
        passed_over = [
            PassedOver(process=worker.process, why=_why_not(worker, pool, request))
            for pool in pools
            for worker in pool.workers()
            if worker.process not in seen
        ]
        return Sight(tuple(candidates), passed_over, left_out)

    def tell(self, sight: Sight, outcome: Outcome) -> Explanation:
        """What was seen, and what became of the job."""
        passed_over = (*(PassedOver(process=one.worker, why=one.reason) for one in outcome.tried), *sight.passed_over)
        why = None if outcome.why is None else _terms(outcome.why)
        seen = Explanation(
            router=self._router,
            outcome="placed",
            why=why,
            candidates=sight.candidates,
            passed_over=passed_over[:MOST],
            left_out=sight.left_out + max(0, len(passed_over) - MOST),
        )
        match outcome.answer:
            case Accepted() as accepted:
                return replace(seen, prefill=accepted.prefill, decode=accepted.decode)
            case Queue(reason=reason):
                return replace(seen, outcome="queue", reason=reason)
            case Refused() as said:
                return replace(seen, outcome="refused", reason=said.reason, retry_after=said.retry_after)

    def _ask(self, job: Job) -> Outcome:
        """As `Submits` does, but nobody is told of it."""
        away, left = self._entry.ask(job), self._entry.left(job)
        instead = self._precedence.others_first(job) if away is None else refused(away)
        if instead is not None:
            return self._said(instead)
        pools, request = self._request(job)
        choice = choose(self._view, pools, job, request, left, self._random)
        if choice.instead is not None:
            return self._said(choice.instead, choice.why)
        assert choice.chosen is not None
        prefill = choice.chosen.prefill if isinstance(choice.chosen, Pair) else ""
        return Outcome(Accepted(run=0, prefill=prefill, decode=choice.chosen.decode, router=self._router), choice.why)

    def _said(self, instead: Stays | Refused, why: Why | None = None) -> Outcome:
        answer = Queue(router=self._router, reason=instead.reason) if isinstance(instead, Stays) else instead
        return Outcome(answer, why)

    def _request(self, job: Job) -> tuple[Collection[Pool], Request]:
        pools = self._view.pools(job.model)
        return pools, Request.of(job, Prompt(job).hits(self._index, pools), PATIENCE_S)


def _named(candidates: Candidates, does: str, request: Request, block_tokens: int) -> list[Candidate]:
    """The best of them, best first."""
    best = heapq.nsmallest(MOST, candidates, key=lambda one: (one[0], one[1].process))
    return [
        Candidate(
            process=worker.process,
            does=does,
            cost=round(cost, 6),
            cached=request.tokens - request.uncached(worker.process, block_tokens),
        )
        for cost, worker in best
    ]


def _why_not(worker: Worker, pool: Pool, request: Request) -> str:
    if worker.draining:
        return "draining"
    if worker.degraded:
        return "degraded"
    room = request.room(pool.block_tokens, to_end=pool.to_end)
    blocks = request.blocks(pool.block_tokens) if worker.role is Role.PREFILL else room
    if request.tokens >= worker.context_length or blocks > worker.kv_total:
        return "too_small"
    return "no_credit"


def _terms(why: Why) -> Terms:
    return Terms(
        ttft_s=round(why.ttft_s, 6),
        wait_s=round(why.wait_s, 6),
        uncached=why.uncached,
        load=round(why.load, 4),
        kv=round(why.kv, 4),
    )
