"""TensorRT-LLM as a worker sees an engine: runs become its requests, their chunks become step reports.

Owns the engine's life and which runs begin; `asking` makes them requests, `requests` owns what becomes of those. Must not know
the bus. Invariants: a handoff that came is consumed once; after a fault nothing more is begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from schemas.errors import HeadraceError, Unavailable, UnreadableMessage
from schemas.handoff import FirstToken
from schemas.lifecycle import State
from services.clock import Clock
from services.engine.admission import admit
from services.engine.protocol import EngineInfo, EngineStats, OnStep, RunEnd, RunSpec, RunTotals
from services.engine.trtllm_engine.api import Api, Llm
from services.engine.trtllm_engine.asking import Asker
from services.engine.trtllm_engine.books import Books
from services.engine.trtllm_engine.canary import Canary, warm_up
from services.engine.trtllm_engine.fate import Fate
from services.engine.trtllm_engine.handoff import Consumed, checked
from services.engine.trtllm_engine.legs import Kind, Leg, to_come
from services.engine.trtllm_engine.mirror import Mirror
from services.engine.trtllm_engine.reports import Reports
from services.engine.trtllm_engine.requests import Requests
from services.engine.trtllm_engine.shutdown import end
from services.engine.trtllm_engine.statistics import Iteration, IterationStatistics
from services.engine.trtllm_engine.watch import Watch
from services.kv.pool import BlockPool, LedgerError

_log = logging.getLogger(__name__)


class TrtllmEngine:
    """`timeout_s`: the engine's kv_transfer_timeout_ms. `adapters`: LoRA requests by name. `llm`: for who checks it by hand."""

    def __init__(
        self,
        api: Api,
        llm: Llm,
        info: EngineInfo,
        clock: Clock,
        *,
        timeout_s: float,
        shutdown_s: float = 20.0,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        self.info = info
        self.pool = BlockPool(0)
        self.api = api
        self.llm = llm
        self._clock = clock
        self._timeout_s = timeout_s
        self._shutdown_s = shutdown_s
        self.adapters = adapters or {}
        self._fate = Fate()
        self._asker = Asker(api, llm, info.eos_ids, self.adapters, self._fate.fault)
        self._canary = Canary(api, llm, info)
        self._mirror = Mirror(info.block_tokens)
        self._books = Books(self.pool, info.block_tokens, timeout_s, clock)
        self._statistics = IterationStatistics()
        self._watch: Watch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports = Reports(lambda report: None, self._fate.fault)
        self._requests = self._no_requests()
        self._consumed = Consumed()

    # its life

    async def warm_up(self) -> None:
        try:
            iteration = await warm_up(self._canary, self.llm)
        except HeadraceError:
            await end(self.llm, self._shutdown_s)
            raise
        self._mirror.most = iteration.total
        self.pool = BlockPool(iteration.total, prefix=self._mirror)
        self._books = Books(self.pool, self.info.block_tokens, self._timeout_s, self._clock)
        room = iteration.total * self.info.block_tokens
        self.info = replace(self.info, context_length=min(self.info.context_length, room))
        _log.info("TensorRT-LLM answers; its KV pool has %d blocks of %d tokens", iteration.total, self.info.block_tokens)

    def start(self, on_step: OnStep) -> None:
        self._fate.begin()
        self._reports = Reports(on_step, self._fate.fault)
        self._requests = self._no_requests()
        parts = (self.llm, self._canary, self._books, self._mirror, self._clock, self._timeout_s, self._requests, self._fate)
        watch = self._watch = Watch(*parts, self._on_iteration, self._reports.unfetched)
        self._spawn(watch.read_statistics(), "statistics")
        self._spawn(watch.read_events(), "kv cache events")
        self._spawn(watch.look_after(), "look after the engine")

    async def join(self) -> None:
        await self._fate.join()

    async def stop(self) -> None:
        """Handoffs that peers are fetching are waited for, as long as a shutdown may take: they are void without this process."""
        if self._fate.broken is None and self._watch is not None:
            for leg in self._requests:
                self._requests.drop(leg.spec.run, State.CANCELLED)
            await self._watch.until_fetched(self._shutdown_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await end(self.llm, self._shutdown_s)
        self._requests.clear()

    # runs

    def prefill(self, spec: RunSpec, *, then_decode: bool = False) -> None:
        self._admit(spec)
        if spec.sampling.grammar is not None and spec.choices[0].generated:
            self._cannot_go_on(spec.run)
            return
        kind = Kind.WHOLE if then_decode or to_come(spec) == 1 else Kind.CONTEXT
        self._books.begin(spec.run, len(spec.trunk) + (to_come(spec) if kind is Kind.WHOLE else 1))
        try:
            result = self._asker.whole(spec) if kind is Kind.WHOLE else self._asker.context(spec)
        except HeadraceError:
            self._books.end(spec.run)
            raise
        self._begin(Leg(spec, kind, result, self._clock.monotonic()))

    def decode(
        self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float, opaque: bytes = b""
    ) -> None:
        self._admit(spec, first)
        state = checked(opaque, self.info, spec, first)
        if opaque in self._consumed:
            raise UnreadableMessage("this handoff was consumed before")
        result = self._asker.generation(spec, state)
        self._consumed.add(opaque)
        self._books.begin_anyway(spec.run, len(spec.trunk) + to_come(spec))
        totals = RunTotals(cached_tokens, compute_s)
        self._begin(Leg(spec, Kind.GENERATION, result, self._clock.monotonic(), totals, state.first_gen_tokens))

    def cancel(self, run: int, choices: Collection[int] | None = None) -> None:
        if choices is None:
            self._requests.drop(run, State.CANCELLED)
        for choice in choices or ():  # it is the only one
            self._requests.drop(run, State.FINISHED, choice)

    def pause(self) -> None:
        """The engine itself goes on; what it computes is told later."""
        self._reports.pause()

    def resume(self) -> None:
        self._reports.resume()

    def stats(self) -> EngineStats:
        backlog = sum(leg.uncomputed for leg in self._requests)
        return EngineStats(
            queued=self._statistics.queued,
            queued_tokens=max(0, backlog - self.info.step_tokens),  # one step's worth is in the step in progress
            step_tokens=self.info.step_tokens,
            running=len(self._requests),
            backlog=backlog,
            steps=self._statistics.steps,
            step_p99_s=self._statistics.p99_s,
            in_step_s=self._requests.still_s,
            rates=self._statistics.rates,
        )

    # inside

    def _no_requests(self) -> Requests:
        parts = (self.info, self._books, self._mirror, self._reports, self._clock)
        return Requests(*parts, self._timeout_s, self.api.request_error, self._fate.fault)

    def _admit(self, spec: RunSpec, first: Collection[FirstToken] = ()) -> None:
        if self._fate.broken is not None:
            raise Unavailable("the engine has ended")
        if spec.run in self._requests:
            raise LedgerError("this run computes here already")
        admit(self.info, spec, tuple(first))

    def _cannot_go_on(self, run: int) -> None:
        """A request begins its grammar anew, so what it would write could not follow what the run has written.

        The client's request is right, and sent again it may well succeed: no code that blames it.
        """
        self._books.end(run)
        self._reports.end(RunEnd(run, State.FAILED, "grammar_begun"))

    def _begin(self, leg: Leg) -> None:
        self._requests.add(leg)
        self._spawn(self._requests.read(leg), f"run {leg.spec.run}")

    def _on_iteration(self, iteration: Iteration) -> None:
        self._statistics.observe(iteration)
        self._requests.heard()
        if iteration.seconds:
            self._reports.step(iteration.seconds)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
