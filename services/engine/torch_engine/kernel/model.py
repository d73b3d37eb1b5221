"""A mapped checkpoint and a KV memory, as the kernel sees them; one method computes a step.

Must not know sequences, sampling or who holds a block. Invariant: everything that C holds a pointer to is kept alive here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from services.engine.torch_engine.config import ANOTHER_HEAD, LlamaConfig
from services.engine.torch_engine.kernel.batch import Batch
from services.engine.torch_engine.kernel.checkpoint import Mapped
from services.engine.torch_engine.kernel.library import STRIP, DType, Layer, Library, Linear, Model, Result, Step
from services.models.errors import ModelError

Floats = NDArray[np.float32]


class StopFlag:
    """Set from any thread, it ends the step that was given it before the next layer."""

    def __init__(self) -> None:
        self._flag = np.zeros(1, np.int32)

    @property
    def address(self) -> int:
        return int(self._flag.ctypes.data)

    def set(self) -> None:
        self._flag[0] = 1


class KernelModel:
    """`kv`: the bytes of the pool, whole blocks of `library.block_bytes(...)`. Steps have up to `max_rows` rows.

    Raises `ModelError` for a missing, an unknown or a mis-shaped tensor, MemoryError.
    """

    def __init__(
        self,
        library: Library,
        config: LlamaConfig,
        tensors: Mapping[str, Mapped],
        kv: NDArray[np.uint8],
        *,
        kv_dtype: DType = DType.F16,
        max_rows: int,
        max_threads: int,
    ) -> None:
        self._library = library
        self._config = config
        self._alive: list[object] = [kv, tensors]
        source = _Source(tensors, self._alive)
        rope = config.rope.tables(config.head_dim, config.context)
        self._alive += rope
        embed = source.linear("model.embed_tokens", config.vocab, config.hidden)
        block_bytes = library.block_bytes(config.layers, config.kv_heads, config.head_dim, kv_dtype)
        self._layers = (Layer * config.layers)(*(_layer(source, config, number) for number in range(config.layers)))
        norm = source.norm("model.norm", config.hidden)
        head = embed if config.tied else source.linear("lm_head", config.vocab, config.hidden)
        source.refuse_unused(config.tied)
        self._model = Model(
            layers=self._layers,
            embed=embed.weight,
            norm=norm,
            rope_cos=rope[0].ctypes.data,
            rope_sin=rope[1].ctypes.data,
            kv=kv.ctypes.data,
            head=head,
            layer_count=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate,
            vocab=config.vocab,
            context=config.context,
            embed_dtype=embed.dtype,
            kv_dtype=kv_dtype,
            blocks=kv.nbytes // block_bytes,
            eps=config.eps,
        )
        self._handle = library.open(self._model, max_rows=max_rows, max_tokens=config.context, max_threads=max_threads)
        # Its threads end also when nobody closes it: with the model, which a step in progress keeps.
        self._close = weakref.finalize(self, library.close, self._handle)
        self._close.atexit = False

    def compute(self, batch: Batch, stop: StopFlag, threads: int) -> Floats | None:
        """Logits [sampled rows, vocab], the batch's KV written; None when `stop` was set before all layers were done.

        Raises ValueError for an id, position, block or row out of range.
        """
        if not self._close.alive:
            raise ValueError("the model is closed")
        width = -(-self._config.vocab // STRIP) * STRIP
        logits = np.empty((len(batch.sampled), width), np.float32)
        step = Step(
            ids=batch.ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            tables=batch.tables.ctypes.data,
            spans=batch.spans.ctypes.data,
            sampled=batch.sampled.ctypes.data,
            logits=logits.ctypes.data,
            stop=stop.address,
            logits_step=width,
            rows=len(batch.ids),
            table_length=len(batch.tables),
            span_count=len(batch.spans),
            sampled_count=len(batch.sampled),
        )
        result = self._library.compute(self._handle, step, threads)
        if result is Result.REFUSED:
            raise ValueError("the step names a row, token, position or block that does not exist")
        return None if result is Result.STOPPED else logits[:, : self._config.vocab]

    def invite(self, threads: int) -> None:
        """The threads that the step in progress may have from now on, at least 1; without a step nothing happens."""
        if self._close.alive:
            self._library.invite(self._handle, threads)

    def close(self) -> None:
        """Ends its threads; no step may be running. Idempotent."""
        self._close()


class _Source:
    """Tensors by name, checked, as the kernel's structures; small ones are copied as float32 into `alive`."""

    def __init__(self, tensors: Mapping[str, Mapped], alive: list[object]) -> None:
        self._tensors = tensors
        self._alive = alive
        self._used: set[str] = set()

    def linear(self, name: str, outputs: int, inputs: int, *, biased: bool = False) -> Linear:
        weight = self._take(f"{name}.weight", (outputs, inputs))
        bias = self._floats(f"{name}.bias", outputs) if biased else None
        return Linear(weight.address, bias, outputs, inputs, weight.dtype)

    def norm(self, name: str, width: int) -> int:
        return self._floats(f"{name}.weight", width)

    def refuse_unused(self, tied: bool) -> None:
        """What the model has and the kernel would leave out makes other answers; but for copies of what is computed anyway."""
        ignored = {"lm_head.weight"} if tied else set()
        unused = sorted(name for name in self._tensors.keys() - self._used - ignored if not name.endswith("rotary_emb.inv_freq"))
        if unused:
            raise ModelError(f"the weights hold what this model does not have: {unused[0]} and {len(unused) - 1} more")
        head = self._tensors.get("lm_head.weight") if tied else None
        if head is not None and not head.same_as(self._tensors["model.embed_tokens.weight"]):
            raise ModelError(ANOTHER_HEAD)

    def _floats(self, name: str, width: int) -> int:
        copy = self._take(name, (width,)).as_float32()
        self._alive.append(copy)
        return int(copy.ctypes.data)

    def _take(self, name: str, shape: tuple[int, ...]) -> Mapped:
        self._used.add(name)
        if name not in self._tensors:
            raise ModelError(f"the weights lack {name}")
        found = self._tensors[name]
        if found.shape != shape:
            raise ModelError(f"{name} has shape {list(found.shape)} where the configuration asks for {list(shape)}")
        return found


def _layer(source: _Source, config: LlamaConfig, number: int) -> Layer:
    prefix, hidden, dim = f"model.layers.{number}", config.hidden, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    gate = source.linear(f"{prefix}.mlp.gate_proj", config.intermediate, hidden)
    up = source.linear(f"{prefix}.mlp.up_proj", config.intermediate, hidden)
    if gate.dtype != up.dtype:
        raise ModelError(f"{prefix}.mlp: gate_proj and up_proj are stored in different types")
    return Layer(
        attention_norm=source.norm(f"{prefix}.input_layernorm", hidden),
        query_norm=source.norm(f"{prefix}.self_attn.q_norm", dim) if config.qk_norm else None,
        key_norm=source.norm(f"{prefix}.self_attn.k_norm", dim) if config.qk_norm else None,
        mlp_norm=source.norm(f"{prefix}.post_attention_layernorm", hidden),
        query=source.linear(f"{prefix}.self_attn.q_proj", queries, hidden, biased=config.qkv_bias),
        key=source.linear(f"{prefix}.self_attn.k_proj", keys, hidden, biased=config.qkv_bias),
        value=source.linear(f"{prefix}.self_attn.v_proj", keys, hidden, biased=config.qkv_bias),
        output=source.linear(f"{prefix}.self_attn.o_proj", hidden, queries, biased=config.output_bias),
        gate=gate,
        up=up,
        down=source.linear(f"{prefix}.mlp.down_proj", hidden, config.intermediate),
    )
