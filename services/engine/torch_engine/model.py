"""The Llama forward pass over a paged KV memory, on the device and in the precision of that memory.

Owns the arithmetic; must not know sequences, sampling or who holds a block. Invariant: a row of the step depends on its own
tokens and blocks only. Sources: Llama (arXiv 2302.13971), RMSNorm (arXiv 1910.07467), RoPE (rope.py; pairs are the two halves of
a head, as in Hugging Face checkpoints), GQA (arXiv 2305.13245), norms of q and k (arXiv 2302.05442), SwiGLU (arXiv 2002.05202),
paged KV (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.torch_engine.batch import Batch, Rows, Span
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.pool_size import BLOCK_TOKENS
from services.engine.torch_engine.weights import Layer, Weights


class Llama:
    """Weights and the KV memory `kv` [blocks, layers, 2, block tokens, kv_heads, head_dim]."""

    def __init__(self, config: LlamaConfig, weights: Weights, kv: Tensor) -> None:
        self._config = config
        self._weights = weights
        self._kv = kv
        # One row for the K or V of one block and layer: gathering rows of a matrix is the copy torch does fastest.
        self._gatherable = kv.view(-1, BLOCK_TOKENS * config.kv_heads * config.head_dim)
        self._frequencies = torch.from_numpy(config.rope.frequencies(config.head_dim)).to(kv.device)

    @property
    def device(self) -> torch.device:
        return self._kv.device

    @torch.inference_mode()
    def forward(self, batch: Batch, cancelled: Callable[[], bool]) -> Tensor | None:
        """Logits [sampled rows, vocab], the batch's KV written; None when `cancelled` said so between two layers.

        On a GPU all of that is only queued when this returns (`device.settle`).
        """
        batch = batch.to(self.device)
        self._kv[batch.fresh] = 0.0  # what a former holder left there could be NaN, which no mask hides
        rotation = self._rotation(batch.positions)
        masks = [part.mask(self._kv.dtype) for part in batch.parts]
        hidden = F.embedding(batch.ids, self._weights.embed)
        for number, layer in enumerate(self._weights.layers):
            if cancelled():
                return None
            query = self._project(number, layer, self._norm(hidden, layer.attention_norm), rotation, batch)
            hidden = hidden + F.linear(self._attend(number, query, batch, masks), layer.output, layer.output_bias)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return F.linear(self._norm(hidden[batch.sampled], self._weights.norm), self._weights.head)

    def _project(self, number: int, layer: Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Queries [tokens, heads, head_dim]; keys and values are written to their blocks."""
        heads, kv_heads = self._config.heads, self._config.kv_heads
        qkv = F.linear(hidden, layer.qkv, layer.qkv_bias).view(len(hidden), heads + 2 * kv_heads, self._config.head_dim)
        straight = qkv[:, : heads + kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = straight[:, :heads], straight[:, heads:]
            straight = torch.cat((self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)), dim=1)
        turned = _rotate(straight, rotation)
        self._kv[batch.blocks, number, 0, batch.offsets] = turned[:, heads:]
        self._kv[batch.blocks, number, 1, batch.offsets] = qkv[:, heads + kv_heads :]
        return turned[:, :heads]

    def _attend(self, number: int, query: Tensor, batch: Batch, masks: list[Tensor]) -> Tensor:
        """What each token sees, [tokens, hidden of all heads]."""
        seen = torch.empty_like(query)
        for part, mask in zip(batch.parts, masks, strict=True):
            if isinstance(part, Rows):
                seen[part.rows] = self._attend_rows(number, query[part.rows], part, mask)
            else:
                seen[part.first : part.first + part.count] = self._attend_span(number, query, part, mask)
        return seen.flatten(1)

    def _attend_rows(self, number: int, query: Tensor, rows: Rows, mask: Tensor) -> Tensor:
        """One query token a sequence, [n, heads, head_dim]; the queries that share a KV head stand in for query positions."""
        keys, values = self._gather(number, rows.tables)
        grouped = query.view(len(query), self._config.kv_heads, self._config.group, self._config.head_dim)
        seen = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
        return seen.reshape(query.shape)

    def _attend_span(self, number: int, query: Tensor, span: Span, mask: Tensor) -> Tensor:
        """The span's query tokens, [count, heads, head_dim]; a KV head is the batch, the heads that share it are its heads."""
        keys, values = (kv[0, : span.end].transpose(0, 1)[:, None] for kv in self._gather(number, span.blocks[None]))
        kv_heads, group, head_dim = self._config.kv_heads, self._config.group, self._config.head_dim
        own = query[span.first : span.first + span.count]
        grouped = own.view(span.count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shared = (kv_heads, group, span.end, head_dim)
        seen = F.scaled_dot_product_attention(grouped, keys.expand(shared), values.expand(shared), attn_mask=mask)
        return seen.permute(2, 0, 1, 3).reshape(own.shape)

    def _gather(self, number: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the blocks in `tables` [n, blocks], as [n, tokens, kv_heads, head_dim]."""
        shape = (len(tables), -1, self._config.kv_heads, self._config.head_dim)
        rows = (tables.flatten() * self._config.layers + number) * 2
        keys, values = (self._gatherable.index_select(0, rows + which) for which in (0, 1))
        return keys.view(shape), values.view(shape)

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = F.linear(hidden, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, head_dim / 2]; from float32 angles, in the precision of the heads they turn."""
        angles = positions.float()[:, None, None] * self._frequencies
        amplitude = self._config.rope.amplitude
        return (angles.cos() * amplitude).to(self._kv.dtype), (angles.sin() * amplitude).to(self._kv.dtype)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
