"""What one pool offers a request: who could run each phase, at which predicted cost, and who has no credit.

One pass over the workers and nothing else, because a router does it for every job: no object is made for a worker.

Cost of a prefill worker: predicted seconds to the first token = what it has to compute before + the request's uncached tokens, at
its measured rate. Cost of a decode worker: the share of its KV blocks or of its batch, whichever is larger, that would be taken.
Cost of a worker that does both: as prefill, and each running sequence that its prompt makes wait counts a share of that time.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from operator import itemgetter

from schemas.state import Role
from services.router.placement_request import Request
from services.router.placement_workers import Pool, Worker

FETCH_S = 0.02
"""What a fetch of cached blocks costs beyond its tokens: an offer, a connection."""
DEGRADED_S = 10.0
"""What is added for the last worker of a pool when it may not be able to work: any other way there is comes first."""
RUN_S = 0.002
"""What a queued run costs beyond its tokens: a step of its own."""
STALL_SHARE = 0.1
"""How a second that a running sequence stands still compares with a second until a first token."""
NEVER = float("inf")

Candidates = list[tuple[float, Worker]]
COST = itemgetter(0)


@dataclass(slots=True)
class Survey:
    """Ready candidates, with costs, by what they would do. `tail`: decode workers that would prefill a small tail themselves.

    `pairs`, `alone`: some worker that is not draining may run it as a pair, alone; `fits`: one of those is large enough.
    `soon`: the least cost of a prefill that has no credit yet. `refused`: how many had no credit or were passed over.
    `lender`, `lent`: the decode worker that has most of the prompt, and how many blocks.
    """

    pool: Pool
    room: int
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


def survey(pool: Pool, request: Request, now: float, without: Set[str]) -> Survey:
    """What `pool` offers `request` at `now`, without the processes `without`."""
    found = Survey(pool, request.room(pool.block_tokens))
    if request.hits:
        _lend(found, request)
    prefill_alive, prefill_fits = _prefill(found, request, now, without)
    decode_alive, decode_fits = _decode(found, request, now, without, tail=prefill_alive)
    both = pool.well(Role.BOTH)
    alone = both if prefill_alive else {**both, **pool.well(Role.DECODE)}
    alone_alive, alone_fits = _alone(found, alone, request, now, without)
    found.usable = alone_alive or (prefill_alive and decode_alive)
    found.fits = alone_fits or (prefill_fits and decode_fits) or bool(found.tail)
    return found


def gain(found: Survey, request: Request, worker: Worker) -> float:
    """Seconds saved when prefill fetches what the lender has and it has not, rather than computing it; 0 when none are."""
    most = (request.tokens - 1) // found.pool.block_tokens
    blocks = min(found.lent, most) - min(request.hits.get(worker.process, 0), most)
    if blocks <= 0 or not worker.fetch_token_s:
        return 0.0
    tokens = blocks * found.pool.block_tokens
    return max(0.0, tokens * ((worker.token_s or found.pool.token_s) - worker.fetch_token_s) - FETCH_S)


def has_prefill_credit(worker: Worker, uncached: int) -> bool:
    """A worker with nothing queued takes a prompt of any length: it is cut into steps."""
    return worker.queued == 0 or worker.prefill_tokens >= uncached


def has_decode_credit(worker: Worker, room: int) -> bool:
    """One slot is enough for any number of choices: rows beyond the batch wait for a step."""
    return worker.decode_slots >= 1 and worker.kv_blocks >= room


def _lend(found: Survey, request: Request) -> None:
    for process, blocks in request.hits.items():
        if blocks > found.lent and (process in found.pool.decode or process in found.pool.both):
            found.lender, found.lent = process, blocks


def _prefill(found: Survey, request: Request, now: float, without: Set[str]) -> tuple[bool, bool]:
    """Fills `prefill`. Whether one is alive, whether one is large enough."""
    pool, tokens, hits = found.pool, request.tokens, request.hits
    block, blocks, usual, lent = pool.block_tokens, request.blocks(pool.block_tokens), pool.token_s, found.lent
    alive = fits = False
    for process, worker in pool.well(Role.PREFILL).items():
        if worker.draining:
            continue
        alive = True
        if tokens >= worker.context_length or blocks > worker.kv_total:
            continue
        fits = True
        uncached = request.uncached(process, block) if process in hits else tokens
        wait = worker.free_at - now
        cost = (wait if wait > 0 else 0.0) + worker.queued * RUN_S + uncached * (worker.token_s or usual)
        if worker.degraded:
            cost += DEGRADED_S
        if lent and worker.fetch_token_s:
            cost -= gain(found, request, worker)
        if process in without:
            found.refused += 1
        elif worker.queued and worker.prefill_tokens < uncached:
            found.refused += 1
            if cost < found.soon:
                found.soon = cost
        else:
            found.prefill.append((cost, worker))
    return alive, fits


def _decode(found: Survey, request: Request, now: float, without: Set[str], *, tail: bool) -> tuple[bool, bool]:
    """Fills `decode` and, when `tail`, `tail`. Whether one is alive, whether one is large enough."""
    pool, tokens, hits, room = found.pool, request.tokens, request.hits, found.room
    block, usual = pool.block_tokens, pool.token_s
    beat = min(found.prefill, key=COST)[0] if found.prefill else NEVER  # a tail that takes as long is not worth a look
    alive = fits = False
    for process, worker in pool.well(Role.DECODE).items():
        if worker.draining:
            continue
        alive = True
        if tokens >= worker.context_length or room > worker.kv_total:
            continue
        fits = True
        slots, free = worker.decode_slots, worker.kv_blocks
        if slots < 1 or free < room or process in without:
            found.refused += 1
            continue
        here = hits.get(process, 0) if hits else 0
        blocks, batch = 1 - (free - room + here) / worker.kv_total, (worker.running + 1) / (worker.running + slots)
        found.decode.append((blocks if blocks > batch else batch, worker))
        rest = tokens - here * block
        if tail and rest <= worker.prefill_tokens and worker.step_s + rest * (worker.token_s or usual) < beat:
            found.tail.append((_cost_alone(worker, pool, request.uncached(process, block), now), worker))
    return alive, fits


def _alone(found: Survey, workers: dict[str, Worker], request: Request, now: float, without: Set[str]) -> tuple[bool, bool]:
    """Fills `alone`. Whether one is alive, whether one is large enough."""
    pool, room = found.pool, found.room
    alive = fits = False
    for process, worker in workers.items():
        if worker.draining:
            continue
        alive = True
        if request.tokens >= worker.context_length or room > worker.kv_total:
            continue
        fits = True
        uncached = request.uncached(process, pool.block_tokens)
        cost = _cost_alone(worker, pool, uncached, now) + (DEGRADED_S if worker.degraded else 0.0)
        if process in without or not has_decode_credit(worker, room):
            found.refused += 1
        elif not has_prefill_credit(worker, uncached):
            found.refused += 1
            found.soon = min(found.soon, cost)
        else:
            found.alone.append((cost, worker))
    return alive, fits


def _cost_alone(worker: Worker, pool: Pool, uncached: int, now: float) -> float:
    compute = uncached * (worker.token_s or pool.token_s) + worker.queued * RUN_S
    stalls = 1 + worker.running * STALL_SHARE
    return max(0.0, worker.free_at - now) + worker.step_s + compute * stalls
