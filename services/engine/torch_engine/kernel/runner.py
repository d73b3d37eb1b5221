"""Runs the kernel's steps in one thread of its own, and draws the tokens.

Invariant: the thread reads nothing of a sequence and holds no GIL while the kernel computes; the event loop looks for cancelled
rows every 5 ms, and a step whose rows are all cancelled ends before its next layer; so often its threads follow its cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from services.engine.cores import CoreArbiter
from services.engine.drawing import Draws, draws_of, outcomes
from services.engine.runner import Outcome
from services.engine.scheduler import Step
from services.engine.torch_engine.kernel.batch import Batch, build_batch
from services.engine.torch_engine.kernel.model import KernelModel, StopFlag

_LOOK_S = 0.005
_FULL_ROWS = 16
"""From so many rows on each costs its full share of a decode step."""


class KernelRunner:
    """Each step asks `cores` for its threads. `eos_ids` are not drawn before a choice has its `min_tokens`."""

    def __init__(self, model: KernelModel, *, cores: CoreArbiter, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._cores = cores
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, "engine")

    async def execute(self, step: Step) -> Sequence[Outcome] | None:
        rows = sum(chunk.sequence.decoding for chunk in step.chunks)
        more = not all(chunk.samples for chunk in step.chunks)
        async with self._cores.step(decode=rows > 0, rest=max(0.0, 1 - rows / _FULL_ROWS), more=more) as threads:
            return await self._execute(step, threads)

    async def _execute(self, step: Step, threads: int) -> Sequence[Outcome] | None:
        stop = StopFlag()
        draws = draws_of(step, self._eos_ids)
        work = partial(self._compute, build_batch(step), draws, stop, threads)
        computing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            while not (await asyncio.wait({computing}, timeout=_LOOK_S))[0]:
                if all(chunk.sequence.cancelled for chunk in step.chunks):
                    stop.set()
                elif (share := self._cores.reconsider()) != threads:
                    threads = share
                    self._model.invite(threads)
        finally:
            stop.set()  # nobody waits for this step any more
        return computing.result()

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._model.close()
        self._cores.close()

    def _compute(self, batch: Batch, draws: Sequence[Draws], stop: StopFlag, threads: int) -> Sequence[Outcome] | None:
        """In the thread."""
        logits = self._model.compute(batch, stop, threads)
        if logits is None:
            return None
        return outcomes(logits, draws)
