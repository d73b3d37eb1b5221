"""What a router reckons of one worker: what the worker last said, less what was asked of it since.

Must not know other workers, nor where work should go. Invariant: what was asked is off the estimate until the worker's
own numbers contain it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.state import Credits, WorkerState
from services.router.breaker import Breaker
from services.router.placement_workers import UNKNOWN_TOKEN_S, Worker

SLOWEST_TOKEN_S = 1000.0
"""No token is predicted to take longer."""


@dataclass(slots=True, eq=False)
class Charge:
    """Work asked of one worker at `at`. `version`: the first credits that contain it; None while nobody answered."""

    process: str
    at: float
    prefill_tokens: int = 0
    slots: int = 0
    blocks: int = 0
    version: int | None = None

    def open_at(self, version: int) -> bool:
        """True when credits of `version` do not contain this charge yet."""
        return self.version is None or version < self.version


@dataclass(slots=True)
class Known:
    """`heard`: when its last beat came (monotonic seconds). `charges`: what was asked of it and its credits may not contain."""

    state: WorkerState
    credits: Credits
    heard: float
    breaker: Breaker = field(default_factory=Breaker)
    ejected: bool = False
    """An operator took it out, until somebody says readmit or it starts anew."""
    away: bool = False
    """The server saw its connection end, and it was not heard since."""
    charges: list[Charge] = field(default_factory=list)


def estimate(known: Known, now: float) -> Worker:
    """What placement may count on at `now` (monotonic seconds)."""
    state, credits = known.state, known.credits
    token_s = _token_s(state.rates.prefill_tokens_s)
    tokens, slots, blocks = credits.prefill_tokens, credits.decode_slots, credits.kv_blocks
    asked = queued = 0
    free_at = known.heard + state.backlog * (token_s or UNKNOWN_TOKEN_S)
    for charge in known.charges:
        if charge.open_at(credits.version):
            tokens, slots, blocks = tokens - charge.prefill_tokens, slots - charge.slots, blocks - charge.blocks
        if charge.open_at(state.credits.version):
            asked += 1
            if charge.prefill_tokens:
                queued += 1
                free_at = max(free_at, charge.at) + charge.prefill_tokens * (token_s or UNKNOWN_TOKEN_S)
    return Worker(
        process=state.process,
        role=state.role,
        kv_compat=state.kv_compat,
        weights=state.weights,
        context_length=state.context_length,
        block_tokens=state.block_tokens,
        kv_total=state.kv_total,
        queued=state.queued + queued,
        running=state.running,
        prefill_tokens=tokens,
        decode_slots=slots,
        kv_blocks=blocks,
        draining=state.draining or known.ejected,
        degraded=known.away or state.stalled or known.breaker.bars(now, asked),
        free_at=free_at,
        yield_queued=state.yielding_queued,
        yield_s=state.yielding * (token_s or UNKNOWN_TOKEN_S),
        token_s=token_s,
        step_s=state.rates.decode_step_s,
        fetch_token_s=_token_s(state.rates.fetch_tokens_s),
        host=state.host,
    )


def _token_s(rate: float) -> float:
    """Seconds of one token, 0 = not measured. Finite, however small the rate."""
    return min(1 / rate, SLOWEST_TOKEN_S) if rate > 0 else 0.0
