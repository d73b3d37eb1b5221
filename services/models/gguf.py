"""Reads GGUF version 3: metadata, and tensors of type F32, F16, Q4_1 and Q8_0 as float32.

Owns the file's bytes (memory-mapped, read-only); knows nothing of models. Invariant: no length or offset taken from the
file is used before it is checked against the file's size, so a damaged file ends in a `GGUFError`, never in a crash.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block layouts: ggml-common.h (block_q4_1, block_q8_0).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.models.errors import GGUFError

Array = NDArray[np.float32]

_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
_QUANT_BLOCK = 32
_MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_ITEMS: dict[int, np.dtype[Any]] = {
    _F32: np.dtype("<f4"),
    _F16: np.dtype("<f2"),
    _Q4_1: np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", _QUANT_BLOCK // 2)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("values", "i1", _QUANT_BLOCK)]),
}
_VALUES_PER_ITEM = {_F32: 1, _F16: 1, _Q4_1: _QUANT_BLOCK, _Q8_0: _QUANT_BLOCK}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is outermost first (GGUF stores it innermost first); `offset` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    items: int

    @property
    def nbytes(self) -> int:
        return self.items * _ITEMS[self.type].itemsize


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Use as a context manager.

    Raises `GGUFError` when the file is not a whole GGUF file of the version and types we read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # mmap's word for an empty file
                raise GGUFError(f"{path} is empty") from None
        try:
            cursor = _Cursor(self._map, path)
            tensors, keys = _read_header(cursor)
            self.metadata = {cursor.string(): _read_value(cursor, cursor.scalar("I")) for _ in range(keys)}
            infos = [_read_tensor_info(cursor) for _ in range(tensors)]
            self.tensors = self._placed(infos, cursor.position)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._map.close()

    def tensor(self, name: str) -> Array:
        """The values of tensor `name` as a new float32 array of its shape. Raises KeyError for an unknown name."""
        info = self.tensors[name]
        # A copy, because a view would keep the mapping from being closed.
        raw = np.frombuffer(self._map, _ITEMS[info.type], info.items, info.offset).copy()
        return _DEQUANTIZE[info.type](raw).reshape(info.shape)

    def _placed(self, infos: list[TensorInfo], header_end: int) -> dict[str, TensorInfo]:
        """The tensors with their offsets counted from the start of the file, each checked to lie inside it."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"{self._path} has no valid alignment")
        data_start = math.ceil(header_end / alignment) * alignment
        placed = {}
        for info in infos:
            start = data_start + info.offset
            if start + info.nbytes > len(self._map):
                raise GGUFError(f"{self._path} is cut short: tensor {info.name} lies beyond its end")
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.items)
        return placed


class _Cursor:
    """Reads forward through a buffer and refuses to pass its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, count: int) -> int:
        """Passes over `count` bytes; the position where they begin."""
        start = self.position
        if count > len(self._data) - start:
            raise GGUFError(f"{self._path} is cut short or damaged")
        self.position = start + count
        return start

    def bytes(self, count: int) -> bytes:
        start = self.take(count)
        return self._data[start : start + count]

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.take(count * struct.calcsize("<" + code))
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def string(self) -> str:
        return self.bytes(self.scalar("Q")).decode("utf-8", "replace")

    def refuse(self, why: str) -> GGUFError:
        return GGUFError(f"{self._path} {why}")


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata keys."""
    if cursor.bytes(len(_MAGIC)) != _MAGIC:
        raise cursor.refuse("is not a GGUF file")
    version = cursor.scalar("I")
    if version != _VERSION:
        raise cursor.refuse(f"is GGUF version {version}; Headrace reads version {_VERSION}")
    tensors, keys = cursor.scalars("Q", 2)
    return tensors, keys


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _read_array(cursor)
    if kind not in _SCALARS:
        raise cursor.refuse(f"holds metadata of unknown type {kind}")
    return cursor.scalar(_SCALARS[kind])


def _read_array(cursor: _Cursor) -> list[Any]:
    kind, count = cursor.scalar("I"), cursor.scalar("Q")
    if kind == _STRING:
        return [cursor.string() for _ in range(count)]
    if kind not in _SCALARS:
        raise cursor.refuse(f"holds an array of unsupported type {kind}")
    return list(cursor.scalars(_SCALARS[kind], count))


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string()
    dims = cursor.scalar("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.refuse(f"is damaged: tensor {name} has {dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", dims)))
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in _ITEMS:
        raise cursor.refuse(f"holds tensor {name} of GGML type {kind}; Headrace reads F32, F16, Q4_1 and Q8_0")
    per_item = _VALUES_PER_ITEM[kind]
    if shape[-1] % per_item:
        raise cursor.refuse(f"is damaged: rows of tensor {name} are not whole blocks of {per_item}")
    return TensorInfo(name, shape, kind, offset, math.prod(shape) // per_item)


def _dequantize_q4_1(raw: NDArray[Any]) -> Array:
    """value = nibble x scale + minimum; the low nibbles are the block's first half."""
    values = np.empty((len(raw), _QUANT_BLOCK), np.float32)
    values[:, : _QUANT_BLOCK // 2] = raw["nibbles"] & 15
    values[:, _QUANT_BLOCK // 2 :] = raw["nibbles"] >> 4
    values *= raw["scale"].astype(np.float32)[:, None]
    values += raw["minimum"].astype(np.float32)[:, None]
    return values


def _dequantize_q8_0(raw: NDArray[Any]) -> Array:
    return np.asarray(raw["values"] * raw["scale"].astype(np.float32)[:, None], np.float32)


_DEQUANTIZE: dict[int, Callable[[NDArray[Any]], Array]] = {
    _F32: lambda raw: raw.astype(np.float32, copy=False),
    _F16: lambda raw: raw.astype(np.float32),
    _Q4_1: _dequantize_q4_1,
    _Q8_0: _dequantize_q8_0,
}
