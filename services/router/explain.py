"""`hr.admin.router.<id>.explain`: where a job would go now and why, or why not. Nothing is placed, and nothing comes of asking.

Must not decide anything: it asks what decides. The question is JSON, so that a person can type it.
"""

from __future__ import annotations

from random import Random
from typing import Annotated

import msgspec
from msgspec.structs import replace

from schemas.errors import UnreadableMessage
from schemas.identity import job_id, process_id
from schemas.job import LANES, Deadlines, Job, Sampling, Tier, pack_ids
from services.clock import Clock
from services.router.admission import late, presses, too_late
from services.router.entry import Entry
from services.router.placement import Impossible, NoCredit, Pair, Why, place
from services.router.placement_request import Request
from services.router.placement_survey import Candidates, survey
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from services.router.view import View

MOST_TOKENS = 2**20
Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens`: the prompt's ids, or only how many they are. `salt`: the tenant's, in hex. Seconds as in a job's deadlines."""

    model: str
    tokens: Size | Annotated[list[Token], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)]
    tier: Tier = Tier.PAID
    lane: Annotated[int, msgspec.Meta(ge=0, lt=LANES)] = 0
    salt: str = ""
    queue_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    first_token_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """`does`: prefill, decode, alone, or tail (a decode worker that prefills a small rest itself).

    `cached`: the prompt's tokens there. `cost`: predicted seconds to the first token; of decode, its share that is taken.
    """

    process: str
    does: str
    cost: float
    cached: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome`: placed, queue or refused, with a `reason` unless placed. `passed_over`: how many had no credit."""

    outcome: str
    reason: str = ""
    retry_after: float | None = None
    prefill: str = ""
    decode: str = ""
    why: Why | None = None
    candidates: list[Candidate] = []
    passed_over: int = 0


class Explainer:
    def __init__(self, view: View, index: PrefixIndex, entry: Entry, clock: Clock, random: Random) -> None:
        self._view = view
        self._index = index
        self._entry = entry
        self._clock = clock
        self._random = random

    def answer(self, data: bytes) -> Explanation:
        """Raises `UnreadableMessage`."""
        try:
            asked = msgspec.json.decode(data, type=Question)
            return self.explain(self._job(asked))
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableMessage(f"no question that can be explained: {error}") from None

    def explain(self, job: Job) -> Explanation:
        """What would become of `job` now, as new work."""
        pools, now = self._view.pools(job.model), self._view.now()
        request = Request.of(job, Prompt(job).hits(self._index, pools))
        found = [survey(pool, request, now, frozenset()) for pool in pools]
        candidates = [
            candidate
            for one in found
            for does in ("prefill", "decode", "alone", "tail")
            for candidate in _named(getattr(one, does), does, request, one.pool.block_tokens)
        ]
        passed_over = sum(one.refused for one in found)
        away = self._entry.ask(job)
        decision = place(pools, request, now, self._random)
        why = None if isinstance(decision, NoCredit | Impossible) else decision.why
        if away is None and why is not None:
            away = too_late(why, self._entry.left(job))
        seen = Explanation(outcome="queue", why=why, candidates=candidates, passed_over=passed_over)
        if isinstance(decision, Impossible):
            error = decision.error
            return replace(seen, outcome="refused", reason=error.message, retry_after=error.retry_after)
        if away is not None:
            return replace(seen, outcome="refused", reason=away.reason, retry_after=away.retry_after)
        if isinstance(decision, NoCredit):
            return replace(seen, reason=decision.reason)
        if why is not None and presses(job.tier, why):
            return replace(seen, reason="kv_pressure")
        if why is not None and late(why, self._entry.left(job)):
            return replace(seen, reason="late")
        prefill = decision.prefill if isinstance(decision, Pair) else ""
        return replace(seen, outcome="placed", prefill=prefill, decode=decision.decode)

    def _job(self, asked: Question) -> Job:
        now = self._clock.wall()
        ids = asked.tokens if isinstance(asked.tokens, list) else self._random.choices(range(2**32), k=asked.tokens)
        edge = process_id("explain", now, self._random)
        return Job(
            job=job_id(self._random),
            attempt=1,
            model=asked.model,
            prompt=pack_ids(ids),
            sampling=Sampling(seed=0, max_tokens=1),
            deadlines=Deadlines(stamp=now, total=asked.first_token_s, queue=asked.queue_s, first_token=asked.first_token_s),
            reply_to=edge,
            edge=edge,
            tier=asked.tier,
            lane=asked.lane,
            salt=bytes.fromhex(asked.salt),
        )


def _named(candidates: Candidates, does: str, request: Request, block_tokens: int) -> list[Candidate]:
    return [
        Candidate(
            process=worker.process,
            does=does,
            cost=round(cost, 6),
            cached=request.tokens - request.uncached(worker.process, block_tokens),
        )
        for cost, worker in sorted(candidates, key=lambda one: (one[0], one[1].process))
    ]
