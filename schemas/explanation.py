"""Why a router gave a job the answer it gave: for operators (`hr.admin.router.<id>.explain`) and for callers that ask.

Bounded: the best `MOST` candidates of each kind, and as many of those that were passed over.
"""

from __future__ import annotations

import msgspec

from schemas.numbers import Count, Real, Seconds, Tokens

MOST = 16


class Terms(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Of the choice. Tokens to compute; predicted seconds to the first token, of these for others' work; decode's shares.

    `load`: of its batch or KV blocks, whichever is fuller; `kv`: of its KV blocks. None here and below: not told.
    """

    uncached: Tokens
    ttft_s: Real | None = None
    wait_s: Real | None = None
    load: Real | None = None
    kv: Real | None = None


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`does`: prefill, decode, alone, or tail (a decode worker that prefills a small rest itself).

    `cached`: the prompt's tokens there. `cost`: predicted seconds to the first token; of decode, its share that is taken.
    """

    process: str
    does: str
    cached: Tokens
    cost: Real | None = None


class PassedOver(msgspec.Struct, frozen=True, kw_only=True):
    """`why`: draining, degraded, too_small, no_credit; or what the worker said when it was asked, no_answer when it did not."""

    process: str
    why: str


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`outcome`: placed, queue or refused, with a `reason` unless placed. `left_out`: how many workers are not listed."""

    router: str
    outcome: str
    reason: str = ""
    retry_after: Seconds | None = None
    prefill: str = ""
    decode: str = ""
    why: Terms | None = None
    candidates: tuple[Candidate, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()
    left_out: Count = 0
