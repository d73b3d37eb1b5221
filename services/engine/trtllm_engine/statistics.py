"""What TensorRT-LLM measured of its iterations: blocks in use, queue, step times, rates.

Reads its JSON and forgives what is missing: a worker that cannot read statistics serves all the same. Times are seconds here,
milliseconds there. `microBatchId` and `avgNumDecodedTokensPerIter` are always 0 in 1.2.1 and not read.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from schemas.state import Rates
from services.engine.measured import WINDOW, average, p99


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration. Blocks: `used` by requests, of `total`. `queued`: requests that no iteration has computed yet."""

    used: int
    total: int
    block_tokens: int
    seconds: float
    queued: int
    context_tokens: int


def read_iteration(item: Any) -> Iteration:
    """An item of `get_stats_async`, an object or its JSON. Raises ValueError when it is neither."""
    try:
        top = json.loads(item) if isinstance(item, str | bytes) else item
        kv, batch = top.get("kvCacheStats") or {}, top.get("inflightBatchingStats") or {}
        return Iteration(
            used=int(kv.get("usedNumBlocks", 0)),
            total=int(kv.get("maxNumBlocks", 0)),
            block_tokens=int(kv.get("tokensPerBlock", 0)),
            seconds=float(top.get("iterLatencyMS", 0.0)) / 1000,
            queued=int(top.get("numQueuedRequests", 0)) + int(batch.get("numPausedRequests", 0)),
            context_tokens=int(batch.get("numCtxTokens", 0)),
        )
    except (AttributeError, TypeError) as error:
        raise ValueError(f"no iteration statistics: {error}") from None


class IterationStatistics:
    """p99 is over the last 512 iterations, in seconds; rates are exponential averages."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._prefill_tokens_s = 0.0
        self._decode_step_s = 0.0
        self.steps = 0
        self.queued = 0

    def observe(self, iteration: Iteration) -> None:
        self.steps += 1
        self.queued = iteration.queued
        if iteration.seconds <= 0:
            return
        self._seconds.append(iteration.seconds)
        if iteration.context_tokens:
            self._prefill_tokens_s = average(self._prefill_tokens_s, iteration.context_tokens / iteration.seconds)
        else:
            self._decode_step_s = average(self._decode_step_s, iteration.seconds)

    @property
    def p99_s(self) -> float:
        return p99(sorted(self._seconds))

    @property
    def rates(self) -> Rates:
        return Rates(prefill_tokens_s=self._prefill_tokens_s, decode_step_s=self._decode_step_s)
