"""The C interface of `source/kernel.h` in ctypes: structures, field by field, and the functions.

Invariant: the structures are those of HR_VERSION, which a loaded library confirms. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

from services.engine.torch_engine.kernel.compiler import KernelUnavailable

VERSION = 1
BLOCK_TOKENS = 16
STRIP = 32
"""Rows of results are padded to a multiple of this."""


class DType(IntEnum):
    """How weights or KV are stored."""

    F16 = 0
    BF16 = 1
    F32 = 2

    @property
    def itemsize(self) -> int:
        return 4 if self is DType.F32 else 2


class Result(IntEnum):
    DONE = 0
    STOPPED = 1
    REFUSED = 2


class Linear(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outputs", c_int32), ("inputs", c_int32), ("dtype", c_int32)]


class Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("embed", "norm", "rope_cos", "rope_sin", "kv")),
        ("head", Linear),
        *(
            (name, c_int32)
            for name in ("layer_count", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
        ),
        *((name, c_int32) for name in ("embed_dtype", "kv_dtype", "blocks")),
        ("eps", c_float),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "tables", "spans", "sampled", "logits", "stop")),
        ("logits_step", c_int64),
        *((name, c_int32) for name in ("rows", "table_length", "span_count", "sampled_count")),
    ]


class Library:
    """A loaded kernel. `isa`: what its lanes are made of; `fused`: whether a multiply-add rounds once."""

    def __init__(self, path: Path) -> None:
        """Raises `KernelUnavailable`."""
        try:
            self._c: Any = ctypes.CDLL(str(path))
            self._declare_all()
        except (OSError, AttributeError) as error:
            raise KernelUnavailable(f"cannot load {path}: {error}") from None
        if (version := self._c.hr_version()) != VERSION:
            raise KernelUnavailable(f"{path} is version {version} of the kernel, not {VERSION}")
        self.isa: str = self._c.hr_isa().decode()
        self.fused = bool(self._c.hr_fused())

    def _declare_all(self) -> None:
        self._declare("hr_version", c_int32)
        self._declare("hr_isa", ctypes.c_char_p)
        self._declare("hr_fused", c_int32)
        self._declare("hr_block_bytes", c_int64, *[c_int32] * 4)
        self._declare("hr_open", c_void_p, POINTER(Model), *[c_int32] * 3)
        self._declare("hr_compute", c_int32, c_void_p, POINTER(Step), c_int32)
        self._declare("hr_invite", None, c_void_p, c_int32)
        self._declare("hr_close", None, c_void_p)

    def block_bytes(self, layers: int, kv_heads: int, head_dim: int, dtype: DType) -> int:
        return int(self._c.hr_block_bytes(layers, kv_heads, head_dim, dtype))

    def open(self, model: Model, *, max_rows: int, max_tokens: int, max_threads: int) -> int:
        """A handle for `compute` and `close`; `model` and what it points to must outlive it. Raises MemoryError."""
        handle = self._c.hr_open(ctypes.byref(model), max_rows, max_tokens, max_threads)
        if handle is None:
            raise MemoryError("no memory for the kernel's working buffers")
        return int(handle)

    def compute(self, handle: int, step: Step, threads: int) -> Result:
        """One step; one caller at a time."""
        return Result(self._c.hr_compute(handle, ctypes.byref(step), threads))

    def invite(self, handle: int, threads: int) -> None:
        """The threads that the step in progress may have from now on, at least 1; from any thread."""
        self._c.hr_invite(handle, threads)

    def close(self, handle: int) -> None:
        self._c.hr_close(handle)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._c, name)
        function.restype, function.argtypes = result, list(arguments)
