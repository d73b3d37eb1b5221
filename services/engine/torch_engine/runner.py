"""Runs the model's steps in one thread of its own, and draws the tokens.

Invariant: the thread reads nothing of a sequence but its `cancelled` flag, and it alone touches the KV memory during a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from services.engine.drawing import Draws, draws_of, outcomes
from services.engine.runner import Outcome
from services.engine.scheduler import Step
from services.engine.torch_engine.batch import Batch, build_batch
from services.engine.torch_engine.device import settle, to_host
from services.engine.torch_engine.model import Llama


class TorchRunner:
    """`threads`: how many cores one step uses. `eos_ids` are not drawn before a choice has its `min_tokens`."""

    def __init__(self, model: Llama, *, threads: int, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(threads,))

    async def execute(self, step: Step) -> Sequence[Outcome] | None:
        batch = build_batch(step)
        draws = draws_of(step, self._eos_ids)
        sequences = [chunk.sequence for chunk in step.chunks]

        def cancelled() -> bool:
            return all(sequence.cancelled for sequence in sequences)

        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, batch, draws, cancelled)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _compute(self, batch: Batch, draws: Sequence[Draws], cancelled: Callable[[], bool]) -> Sequence[Outcome] | None:
        """In the thread."""
        logits = self._model.forward(batch, cancelled)
        rows = None if logits is None else to_host(logits)
        settle(self._model.device)
        return None if rows is None else outcomes(rows.numpy(), draws)
