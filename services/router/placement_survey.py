"""What one pool offers a request: who could run each phase, at which predicted cost, and who has no credit.

A router does this for every job, so it looks at the workers in the order of a bound on their cost that the pool keeps, makes no
object for any, and, when it is asked for the nearest only, stops at the first that can neither be chosen nor be waited for.

Cost of a prefill worker: predicted seconds to the first token = what it has to compute before + the request's uncached tokens, at
its measured rate. Cost of a decode worker: the share of its KV blocks or of its batch, whichever is larger, that would be taken.
Cost of a worker that does both: as prefill, and each running sequence that its prompt makes wait counts a share of that time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from random import Random

from schemas.state import Role
from services.router.placement_request import Request
from services.router.placement_workers import Entry, Pool, Worker, by_load, turned

FETCH_S = 0.02
"""What a fetch of cached blocks costs beyond its tokens: an offer, a connection."""
DEGRADED_S = 10.0
"""What is added for the last worker of a pool when it may not be able to work: any other way there is comes first."""
RUN_S = 0.002
"""What a queued run costs beyond its tokens: a step of its own."""
STALL_SHARE = 0.1
"""How a second that a running sequence stands still compares with a second until a first token."""
TIE_S, TIE = 0.001, 0.02
"""Predictions that differ by less than both together are the same: rates are not measured better."""
TIE_LOAD = 0.02
"""The same for the share of a decode worker that is taken."""
HOST_LOAD = 0.1
"""How much fuller a decode worker on prefill's host may be: its blocks do not cross a network."""
ROUNDING = 1e-9
"""Of bounds, which are computed in another order than costs."""
MANY = 16
"""More decode workers that are near-ties are not all looked at: it would cost more, and one of them is as good as another."""
NEVER = float("inf")

Candidates = list[tuple[float, Worker]]
COST = itemgetter(0)


@dataclass(slots=True)
class Survey:
    """Ready candidates, with costs, by what they would do. `tail`: decode workers that would prefill a small tail themselves.

    `usable`: some worker that is not draining may decode, `fits`: those that it needs are large enough.
    `soon`: the least cost of one that has no prefill credit yet. `refused`: how many had no credit or were passed over.
    `least_s`: nobody computes the prompt in less.
    `lender`, `lent`: the decode worker that has most of the prompt, and how many blocks.
    """

    pool: Pool
    room: int
    least_s: float
    prefill: Candidates = field(default_factory=list)
    decode: Candidates = field(default_factory=list)
    alone: Candidates = field(default_factory=list)
    tail: Candidates = field(default_factory=list)
    usable: bool = False
    fits: bool = False
    soon: float = NEVER
    refused: int = 0
    lender: str = ""
    lent: int = 0


def survey(pool: Pool, request: Request, now: float, without: Set[str], random: Random | None = None) -> Survey:
    """What `pool` offers `request` at `now`, without the processes `without`.

    With `random` only what may be chosen, and what is counted is counted of those that were looked at. The same is decided, but
    that of many decode workers that are near-ties it looks at `MANY`, drawn at random.
    """
    nearest = random is not None
    found = Survey(pool, request.room(pool.block_tokens, to_end=pool.to_end), _least_s(pool, request))
    if request.hits:
        _lend(found, request)
    prefill, decode, both = (pool.well(role, request.urgent) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
    prefill_fits = _prefill(found, prefill, request, now, without, nearest)
    enough = len(decode)
    if random is not None and enough > MANY and found.room <= TIE_LOAD * decode[0][-1].kv_total:
        decode, enough = turned(decode, TIE_LOAD, random), MANY
    decode_fits = _decode(found, decode, request, without, nearest, enough)
    if prefill:
        _tail(found, decode, request, now, without, nearest, enough)
    if not found.decode:
        found.soon = NEVER  # a prefill without a decode is nothing to wait for
    alone_fits = _alone(found, both, request, now, without, nearest)
    if not prefill:
        alone_fits |= _alone(found, decode, request, now, without, nearest=False)
    found.usable = bool(both or decode)
    found.fits = alone_fits or (prefill_fits and decode_fits) or bool(found.tail)
    return found


def beside(found: Survey, request: Request, first: Worker, without: Set[str]) -> Candidates:
    """Who may go on after `first`: those on its host are preferred when they are close, looked at before or not."""
    if not first.host or not found.decode:
        return found.decode
    degraded = found.decode[0][1].degraded  # nobody is better
    here = [
        (_load(found, request, worker, by_load(worker)) - HOST_LOAD, worker)
        for worker in found.pool.decode_on(first.host)
        if not worker.draining
        and worker.degraded == degraded
        and worker.process not in without
        and _holds(found, request, worker)
        and has_decode_credit(worker, found.room)
    ]
    return here + [way for way in found.decode if way[1].host != first.host]


def gain(found: Survey, request: Request, worker: Worker) -> float:
    """Seconds saved when prefill fetches what the lender has and it has not, rather than computing it; 0 when none are."""
    most = (request.tokens - 1) // found.pool.block_tokens
    blocks = min(found.lent, most) - min(request.hits.get(worker.process, 0), most)
    if blocks <= 0 or not worker.fetch_token_s:
        return 0.0
    tokens = blocks * found.pool.block_tokens
    return max(0.0, tokens * ((worker.token_s or found.pool.token_s) - worker.fetch_token_s) - FETCH_S)


def near(cost: float) -> float:
    """A bound beyond this says that a prediction is worse than one of `cost` seconds."""
    return cost + TIE_S + TIE * cost + ROUNDING


def wait_s(worker: Worker, request: Request, now: float) -> float:
    """Predicted seconds until `worker` begins with it."""
    return max(0.0, worker.free_at - (worker.yield_s if request.urgent else 0.0) - now)


def has_prefill_credit(worker: Worker, uncached: int, urgent: bool) -> bool:
    """A worker with nothing queued before it takes a prompt of any length: it is cut into steps."""
    before = worker.queued - worker.yield_queued if urgent else worker.queued
    return before <= 0 or worker.prefill_tokens >= uncached


def has_decode_credit(worker: Worker, room: int) -> bool:
    """One slot is enough for any number of choices: rows beyond the batch wait for a step."""
    return worker.decode_slots >= 1 and worker.kv_blocks >= room


def _lend(found: Survey, request: Request) -> None:
    pool, lender, most = found.pool, "", 0
    for process, blocks in request.hits.items():
        if blocks > most and (process in pool.decode or process in pool.both):
            lender, most = process, blocks
    found.lender, found.lent = lender, most


def _prefill(found: Survey, workers: Sequence[Entry], request: Request, now: float, without: Set[str], nearest: bool) -> bool:
    """Fills `prefill`. Whether one that was looked at is large enough."""
    pool, tokens, hits = found.pool, request.tokens, request.hits
    block, blocks, usual, lent = pool.block_tokens, request.blocks(pool.block_tokens), pool.token_s, found.lent
    fits, least, best, limit = False, found.least_s, NEVER, NEVER
    for _, ready_at, process, worker in workers:
        wait = ready_at - now if ready_at > now else 0.0
        if wait + least > limit:
            break
        if tokens >= worker.context_length or blocks > worker.kv_total:
            continue
        fits = True
        uncached = request.uncached(process, block) if process in hits else tokens
        cost = wait + worker.queued * RUN_S + uncached * (worker.token_s or usual)
        if worker.degraded:
            cost += DEGRADED_S
        if lent and worker.fetch_token_s:
            cost -= gain(found, request, worker)
        if process in without:
            found.refused += 1
        elif not has_prefill_credit(worker, uncached, request.urgent):
            found.refused += 1
            found.soon = min(found.soon, cost)
        else:
            found.prefill.append((cost, worker))
            if nearest and cost < best:
                best, limit = cost, near(cost)
    return fits


def _decode(found: Survey, workers: Sequence[Entry], request: Request, without: Set[str], nearest: bool, enough: int) -> bool:
    """Fills `decode`, with no more than are `enough`. Whether one that was looked at is large enough."""
    fits, tie = False, NEVER
    for _, least, process, worker in workers:
        if least > tie or len(found.decode) >= enough:
            break
        if not _holds(found, request, worker):
            continue
        fits = True
        if process in without or not has_decode_credit(worker, found.room):
            found.refused += 1
            continue
        load = _load(found, request, worker, least)
        found.decode.append((load, worker))
        if nearest:
            tie = min(tie, load + TIE_LOAD + ROUNDING)
    return fits


def _holds(found: Survey, request: Request, worker: Worker) -> bool:
    """Whether a decode worker that is empty has room for it."""
    return request.tokens < worker.context_length and found.room <= worker.kv_total


def _load(found: Survey, request: Request, worker: Worker, least: float) -> float:
    """The share that is taken with it: no less than before, even where all of the prompt is cached."""
    free = worker.kv_blocks - found.room + request.hits.get(worker.process, 0)
    return max(least, 1 - free / worker.kv_total)


def _tail(
    found: Survey, workers: Sequence[Entry], request: Request, now: float, without: Set[str], nearest: bool, enough: int
) -> None:
    """Fills `tail`: of those that have most of the prompt, and all when it is short, who is faster than prefill.

    Where there is a prefill worker it is `enough` to look at so many that have as much of the prompt as anybody.
    """
    pool, tokens, hits, room = found.pool, request.tokens, request.hits, found.room
    block, usual = pool.block_tokens, pool.token_s
    beat = min(found.prefill, key=COST)[0] if found.prefill else NEVER  # a tail that takes as long is not worth a look
    if found.least_s + pool.shortest_step_s >= beat:
        return
    limit, most = NEVER, 0
    long = tokens > pool.largest_step
    for _, _, process, worker in workers if hits or not long else ():
        if found.prefill and most == enough:
            break
        cached = hits.get(process, 0)
        most += cached == found.lent
        if long and not cached:
            continue
        rest = tokens - cached * block
        least = worker.step_s + rest * (worker.token_s or usual)
        if least >= beat or rest > worker.prefill_tokens or wait_s(worker, request, now) + least > limit:
            continue
        if _holds(found, request, worker) and process not in without and has_decode_credit(worker, room):
            cost = _cost_alone(worker, pool, request, now)
            found.tail.append((cost, worker))
            if nearest:
                limit = min(limit, near(cost))


def _alone(found: Survey, workers: Sequence[Entry], request: Request, now: float, without: Set[str], nearest: bool) -> bool:
    """Fills `alone`. Whether one that was looked at is large enough. `nearest`: `workers` come in order of their wait."""
    pool, room = found.pool, found.room
    fits, least, limit = False, found.least_s, NEVER
    for _, _, process, worker in workers:
        if wait_s(worker, request, now) + least > limit:
            break
        if not _holds(found, request, worker):
            continue
        fits = True
        uncached = request.uncached(process, pool.block_tokens)
        cost = _cost_alone(worker, pool, request, now) + (DEGRADED_S if worker.degraded else 0.0)
        if process in without or not has_decode_credit(worker, room):
            found.refused += 1
        elif not has_prefill_credit(worker, uncached, request.urgent):
            found.refused += 1
            found.soon = min(found.soon, cost)
        else:
            found.alone.append((cost, worker))
            if nearest:
                limit = min(limit, near(cost))
    return fits


def _least_s(pool: Pool, request: Request) -> float:
    """Nobody computes it in less, whatever is cached or can be fetched."""
    cached = max(request.hits.values(), default=0) * pool.block_tokens
    return (request.tokens - cached) * min(pool.fastest_s, pool.token_s)


def _cost_alone(worker: Worker, pool: Pool, request: Request, now: float) -> float:
    uncached = request.uncached(worker.process, pool.block_tokens)
    compute = uncached * (worker.token_s or pool.token_s) + worker.queued * RUN_S
    stalls = 1 + worker.running * STALL_SHARE
    return wait_s(worker, request, now) + worker.step_s + compute * stalls
