"""Whether this machine's kernel keeps its promise: the same row alone and in company, bit for bit.

Run at every start, in some milliseconds, on a small random model: what it finds is what the engine tells the cluster
(`exact_resume`). A compiler or CPU that breaks the promise then costs a capability, not somebody's answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.kernel.batch import Batch
from services.engine.torch_engine.kernel.checkpoint import Mapped
from services.engine.torch_engine.kernel.library import BLOCK_TOKENS, DType, Library
from services.engine.torch_engine.kernel.model import Floats, KernelModel, StopFlag
from services.engine.torch_engine.rope import Rope

_CONFIG = LlamaConfig(
    vocab=67,
    hidden=72,
    intermediate=104,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=24,
    context=96,
    rope=Rope(1e4),
    eps=1e-5,
    tied=True,
)
_LENGTH = 45
_TABLES = ((3, 11, 7), (20, 1, 14), (9, 5, 22), (2, 17, 6))
_BLOCKS = 24

Piece = tuple[int, int, int]
"""Of sequence .. the tokens from .. on, so many."""

_CUT: tuple[tuple[Piece, ...], ...] = (
    ((0, 0, 13), (1, 0, 16)),
    ((0, 13, 31), (1, 16, 1), (2, 0, 44)),
    ((3, 0, _LENGTH), (1, 17, 28), (2, 44, 1), (0, 44, 1)),
)


def is_exact(library: Library) -> bool:
    """Whether prompts in pieces, beside others, on two threads give the logits of each alone, whole, on one thread."""
    alone = [_last_logits(library, [[(number, 0, _LENGTH)]], threads=1)[0] for number in range(len(_TABLES))]
    together = _last_logits(library, _CUT, threads=2)
    rows = zip((piece[0] for piece in _CUT[-1]), together, strict=True)
    return all(alone[number].tobytes() == row.tobytes() for number, row in rows)


def _last_logits(library: Library, steps: Sequence[Sequence[Piece]], *, threads: int) -> Floats:
    """Of the last token of each piece of the last step. The KV memory is full of NaN at first."""
    block_bytes = library.block_bytes(_CONFIG.layers, _CONFIG.kv_heads, _CONFIG.head_dim, DType.F16)
    kv = np.full(_BLOCKS * block_bytes, 0xFF, np.uint8)
    model = KernelModel(library, _CONFIG, _weights(), kv, max_rows=3 * _LENGTH, max_threads=threads)
    try:
        computed = [model.compute(_batch(step), StopFlag(), threads) for step in steps]
    finally:
        model.close()
    assert computed[-1] is not None, "nobody set the flag"
    return computed[-1]


def _batch(step: Sequence[Piece]) -> Batch:
    ids = np.random.default_rng(1).integers(0, _CONFIG.vocab, (len(_TABLES), _LENGTH))
    width = len(_TABLES[0])
    assert width * BLOCK_TOKENS >= _LENGTH, "a table holds a sequence"
    ends = np.cumsum([count for _, _, count in step])
    return Batch(
        ids=np.concatenate([ids[number, first : first + count] for number, first, count in step]).astype(np.int32),
        positions=np.concatenate([np.arange(first, first + count) for _, first, count in step]).astype(np.int32),
        spans=np.array(
            [(end - count, count, number * width) for (number, _, count), end in zip(step, ends, strict=True)], np.int32
        ),
        tables=np.array(_TABLES, np.int32).ravel(),
        sampled=(ends - 1).astype(np.int32),
    )


def _weights() -> dict[str, Mapped]:
    random = np.random.default_rng(2)
    hidden, mlp = _CONFIG.hidden, _CONFIG.intermediate
    queries, keys = _CONFIG.heads * _CONFIG.head_dim, _CONFIG.kv_heads * _CONFIG.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (_CONFIG.vocab, hidden), "model.norm": (hidden,)}
    for number in range(_CONFIG.layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    drawn = {name: random.normal(0.0, 0.3, shape).astype(np.float16) for name, shape in shapes.items()}
    return {f"{name}.weight": Mapped(array.view(np.uint8).ravel(), DType.F16, array.shape) for name, array in drawn.items()}
