"""Looks after a running TensorRT-LLM engine: its statistics, its KV events, what it never gives back.

Owns no request of a client. Invariants: whatever fails here fails no request; nothing waits without an end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.clock import Clock
from services.engine.protocol import EngineWorn
from services.engine.trtllm_engine.api import Iterations, Llm
from services.engine.trtllm_engine.books import Books
from services.engine.trtllm_engine.canary import AGAIN_S, Canary
from services.engine.trtllm_engine.fate import Fate
from services.engine.trtllm_engine.mirror import Mirror
from services.engine.trtllm_engine.requests import Requests
from services.engine.trtllm_engine.statistics import Iteration, read_iteration
from services.telemetry.logs import AtMost

CANARY_S = 10.0
TICK_S = 1.0
SILENCE_S = 2.0
"""After so much silence an iteration over statistics or events ends by itself, and is begun anew."""
_log = logging.getLogger(__name__)


class Watch:
    """`timeout_s`: of transfers. `on_iteration`: gets each iteration's statistics; `on_overdue`: how many handoffs became so."""

    def __init__(
        self,
        llm: Llm,
        canary: Canary,
        books: Books,
        mirror: Mirror,
        clock: Clock,
        timeout_s: float,
        requests: Requests,
        fate: Fate,
        on_iteration: Callable[[Iteration], None],
        on_overdue: Callable[[int], None],
    ) -> None:
        self._llm = llm
        self._canary = canary
        self._books = books
        self._mirror = mirror
        self._clock = clock
        self._timeout_s = timeout_s
        self._requests = requests
        self._fate = fate
        self._on_iteration = on_iteration
        self._on_overdue = on_overdue
        self._used = 0
        self._leaking_since: float | None = None
        self._may_log = AtMost(clock.monotonic)

    @property
    def tick_s(self) -> float:
        return min(TICK_S, self._timeout_s / 4)

    async def read_statistics(self) -> None:
        """For as long as the engine lives; always drained, because the engine may keep them without bound."""
        await self._follow(lambda: self._llm.get_stats_async(timeout=SILENCE_S), self.on_statistics)

    async def read_events(self) -> None:
        """For as long as the engine lives."""
        await self._follow(lambda: self._llm.get_kv_cache_events_async(timeout=SILENCE_S), self._mirror.on_event)

    async def look_after(self) -> None:
        """For as long as the engine lives: what it neither ends nor gives back."""
        while True:
            await asyncio.sleep(self.tick_s)
            try:
                self._requests.give_up_late_ones()
                await self.tick()
            except EngineWorn as error:
                self._fate.wear(error)
            except Exception as error:
                self._fate.fault(error)
                return

    def on_statistics(self, item: object) -> None:
        """One item of `get_stats_async`. Raises ValueError for what is none."""
        iteration = read_iteration(item)
        self._used = iteration.used
        own = self._canary.blocks if self._jobless else 0  # only a canary makes iterations then
        self._books.observe(max(0, iteration.used - own))
        self._on_iteration(iteration)

    async def until_fetched(self, seconds: float) -> None:
        """Until peers have all that was handed off, `seconds` at most."""
        for _ in range(round(min(seconds, self._timeout_s) / AGAIN_S)):
            if not self._books.pinned:
                return
            await asyncio.sleep(AGAIN_S)

    async def tick(self) -> None:
        """One look at what the engine keeps. Raises `EngineWorn`, and what broke the engine."""
        if late := self._books.newly_overdue():
            self._on_overdue(late)
        if not self._books.overdue and not self._in_use and not (self._jobless and self._books.pinned):
            self._leaking_since = None
            return
        if self._books.overdue and self._may_log() is not None:
            _log.warning("a handoff is overdue: nobody fetched it within %.0f s", self._timeout_s)
        await self._canary.run(min(CANARY_S, max(self._timeout_s, self.tick_s)))
        await asyncio.sleep(AGAIN_S)  # the statistics of its iteration come beside its answer
        self._judge()

    @property
    def _jobless(self) -> bool:
        """No request of ours is in the engine."""
        return not len(self._requests)

    @property
    def _in_use(self) -> bool:
        """Blocks are, more than a canary's own, though no request of ours is in the engine."""
        return self._jobless and self._used > max(1, self._canary.blocks)

    def _judge(self) -> None:
        """Blocks in use that no request, and no handoff that may still be fetched, explains. Raises `EngineWorn`.

        For two timeouts without a break: one look may see statistics that are older than the end of the last request.
        """
        now = self._clock.monotonic()
        if not self._in_use or (self._books.pinned and not self._books.overdue):
            self._leaking_since = None
        elif self._leaking_since is None:
            self._leaking_since = now
        elif now - self._leaking_since > 2 * self._timeout_s:
            raise EngineWorn(f"{self._used} KV blocks are in use, and nobody uses them")

    async def _follow(self, source: Callable[[], Iterations], handle: Callable[[object], None]) -> None:
        while True:
            try:
                async for item in source():
                    handle(item)
            except Exception as error:  # whatever it is, requests go on without
                if self._may_log() is not None:
                    _log.warning("statistics or events of the engine could not be read: %r", error)
            await asyncio.sleep(AGAIN_S)
