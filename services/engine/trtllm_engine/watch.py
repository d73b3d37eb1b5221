"""Looks after a running TensorRT-LLM engine: its statistics, its KV events, a canary, what it never gives back.

Owns no request of a client. Invariants: whatever fails here fails no request; nothing waits without an end. A canary is one token
of a prompt of one, both phases at once: it needs no peer, and in 1.2's line the clean-up of handoffs that nobody fetched runs
only when a prompt is scheduled (NVIDIA/TensorRT-LLM PR 12313).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from schemas.errors import Unavailable
from services.clock import Clock
from services.engine.protocol import EngineInfo, EngineWorn
from services.engine.trtllm_engine.api import Api, Iterations, Llm
from services.engine.trtllm_engine.books import Books
from services.engine.trtllm_engine.mirror import Mirror
from services.engine.trtllm_engine.sampling import canary_params
from services.engine.trtllm_engine.statistics import Iteration, read_iteration
from services.telemetry.logs import AtMost

CANARY_S = 10.0
CANARY_BLOCKS = 1
"""What a canary itself uses, in the statistics of its own iteration."""
TICK_S = 1.0
SILENCE_S = 2.0
"""After so much silence an iteration over statistics or events ends by itself, and is begun anew."""
AGAIN_S = 0.05
_SALT = "headrace canary"
_log = logging.getLogger(__name__)


class Canary:
    """One small request of both phases, to see whether the engine answers and to make it look after itself."""

    def __init__(self, api: Api, llm: Llm, info: EngineInfo) -> None:
        self._api = api
        self._llm = llm
        self._eos = info.eos_ids

    async def run(self, within: float) -> bool:
        """Whether it came back within `within` seconds. Raises what broke the engine."""
        params = canary_params(self._api, self._eos)
        result = self._llm.generate_async([min(self._eos)], params, streaming=False, cache_salt=_SALT)
        try:
            async with asyncio.timeout(within):
                async for _ in result:
                    continue
        except TimeoutError:
            result.abort()
            return False
        except self._api.request_error as error:
            _log.warning("the canary request failed: %s", error)
            return False
        return True


async def first_iteration(llm: Llm, within: float) -> Iteration:
    """The newest statistics there are: none exist before the first request. Raises `Unavailable`."""
    try:
        async with asyncio.timeout(within):
            while True:
                async for item in llm.get_stats_async(timeout=AGAIN_S):
                    iteration = read_iteration(item)
                    if iteration.total:
                        return iteration
                await asyncio.sleep(AGAIN_S)
    except (TimeoutError, ValueError) as error:
        raise Unavailable(f"the engine says nothing of its KV pool after its first request: {error}") from None


class Watch:
    """`jobless`: whether no request of ours is in the engine. `on_iteration`: each iteration's statistics. `on_worn`: it must be
    replaced."""

    def __init__(
        self,
        llm: Llm,
        canary: Canary,
        books: Books,
        mirror: Mirror,
        clock: Clock,
        timeout_s: float,
        jobless: Callable[[], bool],
        on_iteration: Callable[[Iteration], None],
        on_worn: Callable[[EngineWorn], None],
    ) -> None:
        self._llm = llm
        self._canary = canary
        self._books = books
        self._mirror = mirror
        self._clock = clock
        self._timeout_s = timeout_s
        self._jobless = jobless
        self._on_iteration = on_iteration
        self._on_worn = on_worn
        self._used = 0
        self._leaking_since: float | None = None
        self._may_log = AtMost(clock.monotonic)

    @property
    def tick_s(self) -> float:
        return min(TICK_S, self._timeout_s / 4)

    async def read_statistics(self) -> None:
        """For as long as the engine lives; always drained, because the engine may keep them without bound."""
        await self._follow(lambda: self._llm.get_stats_async(timeout=SILENCE_S), self._on_statistics)

    async def read_events(self) -> None:
        """For as long as the engine lives."""
        await self._follow(lambda: self._llm.get_kv_cache_events_async(timeout=SILENCE_S), self._mirror.on_event)

    async def tick(self) -> None:
        """One look at what the engine keeps. Raises what broke the engine."""
        if not self._books.overdue and not (self._jobless() and self._used > CANARY_BLOCKS):
            return
        if self._books.overdue and self._may_log() is not None:
            _log.warning("a handoff is overdue: nobody fetched it within %.0f s", self._timeout_s)
        await self._canary.run(min(CANARY_S, max(self._timeout_s, self.tick_s)))
        await asyncio.sleep(AGAIN_S)  # the statistics of its iteration come beside its answer
        self._judge()

    def _judge(self) -> None:
        """Blocks in use that no request, and no handoff that may still be fetched, explains."""
        if not self._jobless() or (self._books.pinned and not self._books.overdue):
            return
        now = self._clock.monotonic()
        if self._used <= CANARY_BLOCKS:
            self._leaking_since = None
        elif self._leaking_since is None:
            self._leaking_since = now
        elif now - self._leaking_since > 2 * self._timeout_s:
            self._on_worn(EngineWorn(f"{self._used} KV blocks are in use, and nobody uses them"))

    async def _follow(self, source: Callable[[], Iterations], handle: Callable[[object], None]) -> None:
        while True:
            try:
                async for item in source():
                    handle(item)
            except Exception as error:  # whatever it is, requests go on without
                if self._may_log() is not None:
                    _log.warning("statistics or events of the engine could not be read: %r", error)
            await asyncio.sleep(AGAIN_S)

    def _on_statistics(self, item: object) -> None:
        iteration = read_iteration(item)
        self._used = iteration.used
        self._books.observe(iteration.used)
        self._on_iteration(iteration)
