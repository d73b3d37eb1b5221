"""One step as tensors: which tokens go through the model together, where their KV lies, which rows yield logits.

Built on the event loop from the sequences, so that the computing thread reads none of them; masks, which can be large, are made
by that thread. Must not know the pool's memory or the model. Invariant: rows are in the order of the step's chunks, those of one
token (decode) and longer ones (prefill) alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.scheduler import Chunk, Step
from services.engine.torch_engine.pool_size import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Span:
    """A prefill chunk: `count` rows from `first` on, which are tokens `start`.. of the sequence that lies in `blocks`."""

    first: int
    count: int
    start: int
    blocks: Tensor

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Causal, additive, [count, end]."""
        seen = torch.arange(self.end, device=self.blocks.device)
        return _mask(seen[None, :] > seen[self.start :, None], dtype)

    def to(self, device: torch.device) -> Span:
        return replace(self, blocks=_move(self.blocks, device))


@dataclass(frozen=True, slots=True)
class Rows:
    """Chunks of one token and of similar context: their rows [n], block tables [n, most blocks], tokens they see [n]."""

    rows: Tensor
    tables: Tensor
    lengths: Tensor

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive, [n, 1, 1, most tokens]."""
        tokens = torch.arange(self.tables.shape[1] * BLOCK_TOKENS, device=self.tables.device)
        return _mask(tokens[None, :] >= self.lengths[:, None], dtype)[:, None, None, :]

    def to(self, device: torch.device) -> Rows:
        return Rows(*(_move(tensor, device) for tensor in (self.rows, self.tables, self.lengths)))


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids`, `positions`, `blocks`, `offsets` [tokens] int64: a token's KV goes to `offsets` of its block.

    `sampled`: the rows that yield logits. `fresh`: blocks whose first token is computed now and whose last one is not.
    """

    ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    spans: tuple[Span, ...]
    singles: tuple[Rows, ...]
    sampled: Tensor
    fresh: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same in the memory of `device`; from the computing thread."""
        if device.type == "cpu":
            return self
        return Batch(
            ids=_move(self.ids, device),
            positions=_move(self.positions, device),
            blocks=_move(self.blocks, device),
            offsets=_move(self.offsets, device),
            spans=tuple(span.to(device) for span in self.spans),
            singles=tuple(rows.to(device) for rows in self.singles),
            sampled=_move(self.sampled, device),
            fresh=_move(self.fresh, device),
        )

    @property
    def parts(self) -> tuple[Rows | Span, ...]:
        """Every row is in one of these, which attend one after the other."""
        return (*self.singles, *self.spans)


def build_batch(step: Step) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    sampled: list[int] = []
    fresh: list[int] = []
    spans: list[Span] = []
    singles: dict[int, list[tuple[int, Chunk]]] = {}
    for chunk in step.chunks:
        first, end, own = len(ids), chunk.end, chunk.sequence.blocks
        ids += chunk.ids
        positions += range(chunk.start, end)
        blocks += [own[position // BLOCK_TOKENS] for position in range(chunk.start, end)]
        last, filled = divmod(end, BLOCK_TOKENS)
        if filled and last * BLOCK_TOKENS >= chunk.start:
            fresh.append(own[last])
        sampled += [first + row for row in chunk.logit_rows]
        if chunk.count > 1:
            spans.append(Span(first, chunk.count, chunk.start, torch.tensor(own[: _blocks_for(end)])))
        else:
            singles.setdefault(_width_class(_blocks_for(end)), []).append((first, chunk))
    where = torch.tensor(positions)
    return Batch(
        ids=torch.tensor(ids),
        positions=where,
        blocks=torch.tensor(blocks),
        offsets=where % BLOCK_TOKENS,
        spans=tuple(spans),
        singles=tuple(_rows(group) for group in singles.values()),
        sampled=torch.tensor(sampled, dtype=torch.int64),
        fresh=torch.tensor(fresh, dtype=torch.int64),
    )


def _rows(group: Seq[tuple[int, Chunk]]) -> Rows:
    lengths = [chunk.start + 1 for _, chunk in group]
    width = _blocks_for(max(lengths))
    tables = []
    for _, chunk in group:
        used = chunk.sequence.blocks[: _blocks_for(chunk.start + 1)]
        # Padded with a block of its own: another sequence's may hold a NaN, and 0 x NaN is NaN behind any mask.
        tables.append([*used, *[used[0]] * (width - len(used))])
    return Rows(torch.tensor([row for row, _ in group]), torch.tensor(tables), torch.tensor(lengths))


def _width_class(blocks: int) -> int:
    """Equal for contexts within a factor of four or so: one long sequence must not pad 31 short ones to its length."""
    return (blocks.bit_length() + 1) // 2


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a row looks, -inf where it must not."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Only queued, when it goes to a GPU: out of pinned memory, which torch keeps until it was read."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
