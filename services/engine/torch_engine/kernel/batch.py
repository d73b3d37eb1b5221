"""One step as flat int32 arrays: the tokens, their positions, and the block table of each chunk.

Built on the event loop from the sequences, so that the computing thread reads none of them. Invariant: spans follow each other in
the order of the step's chunks, and a chunk of one token (decode) is a span like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.engine.scheduler import Step
from services.engine.torch_engine.kernel.library import BLOCK_TOKENS

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids`, `positions` [tokens]; `spans` [chunks, 3]: first row, rows, where its blocks begin in `tables`.

    `sampled`: the rows that yield logits.
    """

    ids: Ints
    positions: Ints
    spans: Ints
    tables: Ints
    sampled: Ints


def build_batch(step: Step) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int]] = []
    tables: list[int] = []
    sampled: list[int] = []
    for chunk in step.chunks:
        first = len(ids)
        spans.append((first, chunk.count, len(tables)))
        ids += chunk.ids
        positions += range(chunk.start, chunk.end)
        tables += chunk.sequence.blocks[: -(-chunk.end // BLOCK_TOKENS)]
        sampled += [first + row for row in chunk.logit_rows]
    return Batch(*(np.array(values, np.int32) for values in (ids, positions, spans, tables, sampled)))
