"""A kernel over a KV memory full of NaN, whose blocks are given out in a random order; and tiny checkpoints for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType

import numpy as np

from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.kernel.batch import Batch
from services.engine.torch_engine.kernel.checkpoint import Mapped, map_checkpoint
from services.engine.torch_engine.kernel.library import BLOCK_TOKENS, DType, Library
from services.engine.torch_engine.kernel.model import Floats, KernelModel, StopFlag

BLOCKS = 96
NAN = 0xFF
"""A byte that makes a NaN of a float16 and of a float32."""


@dataclass(slots=True)
class Tokens:
    """A sequence: its ids, its blocks, how many tokens are computed."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` tokens of a sequence; the last `logits` of them yield logits."""

    tokens: Tokens
    count: int
    logits: int = 1


@dataclass(slots=True)
class Machine:
    """One worker's kernel. `close` it, or use it as a context manager."""

    library: Library
    config: LlamaConfig
    tensors: dict[str, Mapped]
    kv_dtype: DType = DType.F16
    max_threads: int = 3
    seed: int = 5
    kv: np.ndarray = field(init=False)
    model: KernelModel = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        size = self.library.block_bytes(config.layers, config.kv_heads, config.head_dim, self.kv_dtype)
        self.kv = np.full((BLOCKS, size), NAN, np.uint8)
        self.model = KernelModel(
            self.library,
            config,
            self.tensors,
            self.kv.reshape(-1),
            kv_dtype=self.kv_dtype,
            max_rows=600,
            max_threads=self.max_threads,
        )
        self.free = list(range(BLOCKS))
        Random(self.seed).shuffle(self.free)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.model.close()

    def tokens(self, ids: Sequence[int]) -> Tokens:
        return Tokens(list(ids), [self.free.pop() for _ in range(-(-len(ids) // BLOCK_TOKENS))])

    def step(self, *pieces: Piece, threads: int = 1, stop: StopFlag | None = None) -> Floats | None:
        logits = self.model.compute(batch(*pieces), stop or StopFlag(), threads)
        for piece in pieces:
            piece.tokens.computed += piece.count
        return logits

    def whole(self, ids: Sequence[int]) -> Floats:
        """Logits of every token of a prompt that is computed alone, in one step, on one thread."""
        tokens = self.tokens(ids)
        logits = self.step(Piece(tokens, len(ids), len(ids)))
        self.free += tokens.blocks
        assert logits is not None
        return logits


def batch(*pieces: Piece) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int]] = []
    tables: list[int] = []
    sampled: list[int] = []
    for piece in pieces:
        end = piece.tokens.computed + piece.count
        spans.append((len(ids), piece.count, len(tables)))
        ids += piece.tokens.ids[piece.tokens.computed : end]
        positions += range(piece.tokens.computed, end)
        tables += piece.tokens.blocks[: -(-end // BLOCK_TOKENS)]
        sampled += range(len(ids) - piece.logits, len(ids))
    return Batch(*(np.array(values, np.int32) for values in (ids, positions, spans, tables, sampled)))


def tensors_in(folder: Path) -> dict[str, Mapped]:
    return map_checkpoint(sorted(folder.glob("*.safetensors")))
