"""Safetensors files mapped read-only: the address of each tensor, in pages that all processes of the machine share.

Knows no model. Invariant: nothing is copied and nothing can be written through it; what a file's header promises lies inside the
file. Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.torch_engine.kernel.library import DType
from services.models.errors import ModelError

_MOST_HEADER_BYTES = 100_000_000
_DTYPES = {"F16": DType.F16, "BF16": DType.BF16, "F32": DType.F32}


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor's bytes in a mapped file, row-major."""

    data: NDArray[np.uint8]
    dtype: DType
    shape: tuple[int, ...]

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def same_as(self, other: Mapped) -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape) and np.array_equal(self.data, other.data)

    def as_float32(self) -> NDArray[np.float32]:
        """A copy, for the small tensors: norms and biases."""
        if self.dtype is DType.BF16:
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        kind = np.float16 if self.dtype is DType.F16 else np.float32
        return np.frombuffer(self.data.tobytes(), kind).astype(np.float32).reshape(self.shape)


def map_checkpoint(files: Sequence[Path]) -> dict[str, Mapped]:
    """The tensors of all `files` by name. Raises `ModelError` that names the file."""
    tensors: dict[str, Mapped] = {}
    for file in files:
        try:
            tensors |= _map_file(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is not a whole safetensors file: {error}; fetch the model again") from None
    return tensors


def _map_file(file: Path) -> dict[str, Mapped]:
    with open(file, "rb") as opened:
        content = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    length = int.from_bytes(content[:8].tobytes(), "little")
    if len(content) < 8 or not 0 < length <= min(len(content) - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
    header: Mapping[str, Any] = json.loads(content[8 : 8 + length].tobytes())
    data = content[8 + length :]
    data[:: mmap.PAGESIZE].max(initial=0)  # reads every page now, so that no step waits for the disk
    return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: Mapping[str, Any], data: NDArray[np.uint8]) -> Mapped:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(f"{name} is stored as {entry['dtype']}; the kernel reads {', '.join(_DTYPES)}")
    shape = tuple(int(extent) for extent in entry["shape"])
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} does not lie where the header says")
    return Mapped(data[begin:end], dtype, shape)
