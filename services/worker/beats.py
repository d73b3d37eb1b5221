"""A worker's state, said every 250 ms and on change (debounced to 20 ms), and its entry in the registry.

Owns the credit version. Invariant: every credit that leaves this process, in a beat or in an answer, has a version of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from schemas.errors import BusError
from schemas.state import Credits, Role, WorkerState
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock
from services.engine.protocol import Engine, EngineStats
from services.kv.holders import ReservationHolder
from services.worker.stalls import StallWatch

BEAT_S = 0.25
DEBOUNCE_S = 0.02


class Beats:
    """`decoding` counts the choices that decode or will (a handoff that is being pulled); `to_come` the
    tokens of runs that the engine has not yet. `host`: equal on one machine."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        engine: Engine,
        role: Role,
        clock: Clock,
        decoding: Callable[[], int],
        to_come: Callable[[], int],
        stalls: StallWatch,
        host: str = "",
    ) -> None:
        self._bus = bus
        self._subject = subjects.worker_state(role, engine.info.model, bus.process)
        self._engine = engine
        self._role = role
        self._clock = clock
        self._decoding = decoding
        self._to_come = to_come
        self._stalls = stalls
        self._host = host
        self._versions = itertools.count(1)
        self._changed = asyncio.Event()
        self.draining = False
        self.fetch_tokens_s = 0.0

    def queued_tokens(self, stats: EngineStats) -> int:
        """Of runs that are in no step yet, those included that are not in the engine yet."""
        return stats.queued_tokens + self._to_come()

    @property
    def decode_slots(self) -> int:
        """Choices that may come to decode here."""
        reserved = sum([isinstance(holder, ReservationHolder) for holder in self._engine.pool.holders])
        return max(0, self._engine.info.max_batch - self._decoding() - reserved)

    def credits(self, stats: EngineStats | None = None) -> Credits:
        """What this worker would still take, now; `stats`: the engine's, as they are now."""
        stats = stats or self._engine.stats()
        return Credits(
            version=next(self._versions),
            prefill_tokens=max(0, stats.step_tokens - self.queued_tokens(stats)),
            decode_slots=self.decode_slots,
            kv_blocks=self._engine.pool.available,
        )

    def state(self) -> WorkerState:
        info, stats, pool = self._engine.info, self._engine.stats(), self._engine.pool
        return WorkerState(
            process=self._bus.process,
            role=self._role,
            model=info.model,
            kv_compat=info.kv_compat,
            weights=info.weights,
            schemas=self._bus.dialect.own,
            capabilities=info.capabilities,
            credits=self.credits(stats),
            sent=self._clock.wall(),
            context_length=info.context_length,
            block_tokens=info.block_tokens,
            queued=stats.queued,
            running=stats.running,
            backlog=stats.backlog,
            yielding=stats.yielding,
            yielding_queued=stats.yielding_queued,
            swapped=stats.swapped,
            kv_used=pool.held,
            kv_total=pool.total,
            swap_used=pool.swap.used,
            steps=stats.steps,
            step_p99_s=stats.step_p99_s,
            rates=msgspec.structs.replace(stats.rates, fetch_tokens_s=self.fetch_tokens_s),
            draining=self.draining,
            stalled=self._stalls.stalled,
            host=self._host,
        )

    def changed(self) -> None:
        """Something that routers care about changed; a beat follows within 20 ms."""
        self._changed.set()

    def say(self) -> None:
        """One beat, now. Nothing while the bus is down: a late one would be a lie."""
        try:
            send(self._bus, self._subject, self.state())
        except BusError:
            return

    async def run(self) -> None:
        """Beats for as long as the worker lives."""
        while True:
            self._changed.clear()
            self.say()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._changed.wait()
                await asyncio.sleep(DEBOUNCE_S)
            except TimeoutError:
                continue
