"""Where a job goes: a pure function of what is seen of the workers, the job, the time and a source of randomness.

Knows no bus, no clock and no prices. Invariants: a worker is chosen only with credit, and a job that some live worker has credit
for is placed, unless it has patience left and a better worker is about to have credit. The worker has the last word; who refuses
is passed in `without`, and the next best is chosen.

Least predicted time to the first token wins; near-ties are drawn at random, so that routers which see the same do not all choose
the same. A hot prefix spills by itself: as soon as the queue before it costs more than computing it anew elsewhere. A decode
worker prefills a tail of at most one step itself when that is faster than the best pair.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field, replace
from random import Random

from schemas.errors import ContextLengthExceeded, HeadraceError, ModelChanged, ModelLoading
from schemas.placement import CachedBlocks
from schemas.state import Role
from services.router.placement_request import Request
from services.router.placement_survey import COST, TIE, TIE_LOAD, TIE_S, Candidates, Survey, beside, gain, survey, wait_s
from services.router.placement_workers import Entry, Pool, Worker

RETRY_LOADING_S = 5.0
"""How soon to ask again for a model that no live worker serves."""
BETTER_S, BETTER = 0.01, 0.1
"""A worker without credit is waited for when it is predicted to be faster by more than both together."""


@dataclass(frozen=True, slots=True)
class Why:
    """The terms of a choice. Predicted seconds until the first token, tokens it computes, decode's share taken with it.

    Of those that were looked at, `ready` could have been chosen, `refused` had no credit or had said no.
    `wait_s`: the part of `ttft_s` for others' work.
    `kv`: the share of decode's KV blocks that is taken with it; `busy`: decode computes for others, so more will be free.
    """

    ttft_s: float
    uncached: int
    load: float
    ready: int
    refused: int
    wait_s: float = 0.0
    kv: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill on one worker, decode on another. `blocks` to reserve on decode; `uncached` tokens to compute.

    `fetch`: what prefill fetches from a decode worker's cache because that is faster than computing it.
    """

    prefill: str
    decode: str
    blocks: int
    fetch: CachedBlocks | None = None
    uncached: int = field(default=0, compare=False)
    why: Why | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Local:
    """Both phases on one worker."""

    decode: str
    blocks: int
    uncached: int = field(default=0, compare=False)
    why: Why | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NoCredit:
    """Not now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """Not by any worker that is alive; waiting for credit cannot help."""

    error: HeadraceError


Decision = Pair | Local | NoCredit | Impossible


def place(pools: Collection[Pool], request: Request, now: float, random: Random, without: Set[str] = frozenset()) -> Decision:
    """The fastest way to run `request` on the `pools` of its model at monotonic time `now`, never using one of `without`."""
    if not pools:
        return Impossible(ModelLoading("The model is not loaded yet.", retry_after=RETRY_LOADING_S))
    same = [pool for pool in pools if not request.weights or pool.weights == request.weights]
    if not same:
        return Impossible(ModelChanged("The model was replaced while this request was running."))
    if request.suspect:
        same = [_first(pool, request) for pool in same]
    usable = [found for found in (survey(pool, request, now, without, random) for pool in same) if found.usable]
    if not usable:
        return NoCredit("no_pair")
    fitting = [found for found in usable if found.fits]
    if not fitting:
        return Impossible(ContextLengthExceeded(f"{request.tokens} tokens are more than this model can take.", param="messages"))
    ways = [way for found in fitting for way in _ways(found, request, now, without, random)]
    if not ways:
        return NoCredit("no_credit")
    cost, decision = min(ways, key=lambda way: way[0])
    soon = min(found.soon for found in fitting)
    if soon < request.patience and soon + BETTER_S < cost * (1 - BETTER):
        return NoCredit("better_soon")
    return decision


_Way = tuple[float, Pair | Local]


def _ways(found: Survey, request: Request, now: float, without: Set[str], random: Random) -> list[_Way]:
    """The best pair and the best worker alone of one pool, each with its predicted time to the first token."""
    ways: list[_Way] = []
    if found.prefill and found.decode:
        cost, first = _draw(found.prefill, TIE_S, TIE, random)
        load, then = _draw(beside(found, request, first, without), TIE_LOAD, 0.0, random)
        fetch = CachedBlocks(process=found.lender, blocks=found.lent) if gain(found, request, first) > 0 else None
        uncached = request.uncached(found.lender if fetch else first.process, found.pool.block_tokens)
        why = _why(cost, uncached, load, len(found.prefill) + len(found.decode), found, wait_s(first, request, now), then)
        ways.append((cost, Pair(first.process, then.process, found.room, fetch, uncached, why)))
    alone = found.alone or found.tail
    if alone:
        cost, one = _draw(alone, TIE_S, TIE, random)
        uncached = request.uncached(one.process, found.pool.block_tokens)
        why = _why(cost, uncached, 0.0, len(alone), found, wait_s(one, request, now), one)
        worse = TIE_S + TIE * cost  # a pair is as good as one that is faster by no more than this
        ways.append((cost + worse, Local(one.process, found.room, uncached, why)))
    return ways


def _why(cost: float, uncached: int, load: float, ready: int, found: Survey, wait: float, decode: Worker) -> Why:
    kv = 1 - (decode.kv_blocks - found.room) / decode.kv_total
    return Why(cost, uncached, load, ready, found.refused, wait, kv, decode.running > 0)


def _draw(candidates: Candidates, absolute: float, relative: float, random: Random) -> tuple[float, Worker]:
    """One of those that cost no more than the cheapest, or hardly more."""
    least = min(candidates, key=COST)[0]
    limit = least + absolute + relative * abs(least)
    near = [candidate for candidate in candidates if candidate[0] <= limit]
    return near[0] if len(near) == 1 else random.choice(near)


def _first(pool: Pool, request: Request) -> Pool:
    """`pool` with one worker a phase that is large enough, the same whoever asks. It makes room, so it counts as empty."""
    prefill = _able(pool.well(Role.PREFILL), request, request.blocks(pool.block_tokens))
    room = request.room(pool.block_tokens, to_end=pool.to_end)
    decode, both = (_able(pool.well(role), request, room) for role in (Role.DECODE, Role.BOTH))
    pair = [min(prefill), min(decode)] if prefill and decode else []
    alone = [] if pair else sorted(both if prefill else {**both, **decode})[:1]
    one = Pool(pool.kv_compat, pool.weights, pool.block_tokens, pool.token_s, to_end=pool.to_end)
    for process in pair + alone:
        worker = (prefill | decode | both)[process]
        one.put(replace(worker, queued=0, running=0, decode_slots=1, kv_blocks=worker.kv_total))
    return one


def _able(workers: Sequence[Entry], request: Request, blocks: int) -> dict[str, Worker]:
    return {
        process: worker
        for _, _, process, worker in workers
        if request.tokens < worker.context_length and blocks <= worker.kv_total
    }
