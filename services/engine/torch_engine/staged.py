"""A KV pool in a GPU's memory. What moves to another worker goes through a copy of its blocks on the host.

Owns: that copy, slot for slot as large as the pool, of which the system gives a page when a block first moves; and one thread
that copies. Must not know transfers, models. Invariant: the blocks of a copy are held until it ended, whoever still waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from services.kv.holders import StagingHolder
from services.kv.pool import BlockPool

_PIECE_BYTES = 64 << 20


class StagedPool(BlockPool):
    """`tensor` [blocks, …] is what the model computes on; `view` and `memory` are the host's copy, `copy` moves on the device."""

    def __init__(self, tensor: Tensor, **options: Any) -> None:
        super().__init__(len(tensor), **options)
        self._device = tensor.view(self.total, -1).view(torch.uint8)
        self._host = torch.frombuffer(self.memory, dtype=torch.uint8).view(self.total, -1)
        self._piece = max(1, _PIECE_BYTES // self.block_bytes)
        self._moves = itertools.count()
        self._thread = ThreadPoolExecutor(1, "kv staging")
        is_cuda = tensor.device.type == "cuda"
        self._pinned = is_cuda
        self._stream = torch.cuda.Stream(tensor.device) if is_cuda else None  # type: ignore[no-untyped-call]

    async def stage_out(self, blocks: Sequence[int]) -> None:
        await self._move(self._download, [block for block in blocks if not self.has_checksum(block)])

    async def stage_in(self, blocks: Sequence[int]) -> None:
        await self._move(self._upload, blocks)

    def attest(self, blocks: Sequence[int]) -> None:
        """Not before they go out: that would move every block to the host, and few of them are ever read there."""

    def copy(self, source: int, target: int) -> None:
        self._device[target].copy_(self._device[source])

    def read(self, block: int) -> bytes:
        return self._device[block].cpu().numpy().tobytes()

    def write(self, block: int, content: bytes) -> None:
        self._device[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    async def _move(self, work: Callable[[Sequence[int]], None], blocks: Sequence[int]) -> None:
        if not blocks:
            return
        holder = StagingHolder(next(self._moves))
        self.hold(holder, blocks)
        moving = asyncio.get_running_loop().run_in_executor(self._thread, work, list(blocks))
        moving.add_done_callback(lambda _: self.release(holder))
        await asyncio.shield(moving)

    # in the thread; a stream of its own, so that a copy does not wait for the step in progress

    def _download(self, blocks: Sequence[int]) -> None:
        with self._queue():
            for slots in self._pieces(blocks):
                buffer = self._buffer(len(slots))
                buffer.copy_(self._device.index_select(0, slots.to(self._device.device)), non_blocking=True)
                self._wait()
                self._host[slots] = buffer

    def _upload(self, blocks: Sequence[int]) -> None:
        with self._queue():
            for slots in self._pieces(blocks):
                buffer = self._buffer(len(slots))
                torch.index_select(self._host, 0, slots, out=buffer)
                self._device[slots.to(self._device.device)] = buffer.to(self._device.device, non_blocking=True)
                self._wait()  # the buffer is free, and the next step finds the blocks

    def _pieces(self, blocks: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(torch.tensor(blocks), self._piece)

    def _buffer(self, count: int) -> Tensor:
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=self._pinned)

    def _queue(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
