"""One step as tensors: which tokens go through the model together, where their KV lies, which rows yield logits.

Built on the event loop from the sequences, so that the computing thread reads none of them. Must not know the pool's memory or
the model. Invariant: rows are in the order of the step's chunks, those of one token (decode) and longer ones (prefill) alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.scheduler import Chunk, Step
from services.engine.torch_engine.memory import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Span:
    """A prefill chunk: rows `first`..`first+count-1`; they see the sequence's `end` tokens, causally. `mask` [count, end]."""

    first: int
    count: int
    end: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The single-token chunks: their rows [n], block tables [n, most blocks], mask [n, 1, 1, most tokens]."""

    rows: Tensor
    tables: Tensor
    mask: Tensor


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
    singles: Rows | None
    sampled: Tensor
    fresh: Tensor


def build_batch(step: Step) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    sampled: list[int] = []
    fresh: list[int] = []
    spans: list[Span] = []
    singles: list[tuple[int, Chunk]] = []
    for chunk in step.chunks:
        first, end = len(ids), chunk.start + chunk.count
        ids += chunk.sequence.ids[chunk.start : end]
        positions += range(chunk.start, end)
        blocks += [chunk.sequence.blocks[position // BLOCK_TOKENS] for position in range(chunk.start, end)]
        last, filled = divmod(end, BLOCK_TOKENS)
        if filled and last * BLOCK_TOKENS >= chunk.start:
            fresh.append(chunk.sequence.blocks[last])
        if chunk.samples:
            sampled.append(len(ids) - 1)
        if chunk.count == 1:
            singles.append((first, chunk))
        else:
            spans.append(_span(first, chunk))
    where = torch.tensor(positions)
    return Batch(
        ids=torch.tensor(ids),
        positions=where,
        blocks=torch.tensor(blocks),
        offsets=where % BLOCK_TOKENS,
        spans=tuple(spans),
        singles=_rows(singles) if singles else None,
        sampled=torch.tensor(sampled, dtype=torch.int64),
        fresh=torch.tensor(fresh, dtype=torch.int64),
    )


def _span(first: int, chunk: Chunk) -> Span:
    end = chunk.start + chunk.count
    table = torch.tensor(chunk.sequence.blocks[: -(-end // BLOCK_TOKENS)])
    hidden = torch.arange(end)[None, :] > torch.arange(chunk.start, end)[:, None]
    return Span(first, chunk.count, end, table, _mask(hidden))


def _rows(singles: Seq[tuple[int, Chunk]]) -> Rows:
    lengths = torch.tensor([chunk.start + 1 for _, chunk in singles])
    width = -(-int(lengths.max()) // BLOCK_TOKENS)
    # Padded with the row's own first block: another sequence's block may hold a NaN, and 0 x NaN is NaN behind any mask.
    tables = [[*blocks, *[blocks[0]] * (width - len(blocks))] for blocks in (_used(chunk) for _, chunk in singles)]
    hidden = torch.arange(width * BLOCK_TOKENS)[None, :] >= lengths[:, None]
    return Rows(torch.tensor([row for row, _ in singles]), torch.tensor(tables), _mask(hidden)[:, None, None, :])


def _used(chunk: Chunk) -> tuple[int, ...]:
    return chunk.sequence.blocks[: chunk.start // BLOCK_TOKENS + 1]


def _mask(hidden: Tensor) -> Tensor:
    """Additive: 0 where a row looks, -inf where it must not."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
