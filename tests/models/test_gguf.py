"""The reader gives the numbers that were written, and an error, never a crash, for a damaged file."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.models.errors import GGUFError
from services.models.gguf import GGUFFile
from tests.models.tiny_gguf import F16, F32, Q4_1, Q8_0, Tensors, gguf_bytes, llama_metadata, llama_tensors


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def one_tensor(path: Path, kind: int, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    with GGUFFile(write(path / "x.gguf", gguf_bytes({}, {"pad": (F32, (1,), b"\0" * 4), "t": (kind, shape, data)}))) as gguf:
        return gguf.tensor("t")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = {"s": "é", "i": 7, "f": 0.5, "b": True, "ints": [1, 2], "strings": ["a", ""], "general.alignment": 64}
    with GGUFFile(write(tmp_path / "x.gguf", gguf_bytes(metadata, {}, alignment=64))) as gguf:
        assert gguf.metadata == metadata


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "<f4"), (F16, "<f2")])
def test_floats_come_back_as_they_are(tmp_path: Path, kind: int, dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    read = one_tensor(tmp_path, kind, (2, 3), values.tobytes())
    assert read.dtype == np.float32
    assert np.array_equal(read, values)


def test_q8_0_is_value_times_scale(tmp_path: Path) -> None:
    values = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    data = b"".join(struct.pack("<e", scale) + row.tobytes() for scale, row in zip((0.5, 2.0), values, strict=True))
    read = one_tensor(tmp_path, Q8_0, (1, 64), data)
    assert np.array_equal(read, (values * np.array([[0.5], [2.0]])).reshape(1, 64))


def test_q4_1_is_nibble_times_scale_plus_minimum_low_nibbles_first(tmp_path: Path) -> None:
    low, high = np.arange(16), np.arange(15, -1, -1)
    data = struct.pack("<ee", 0.25, -1.0) + (low | high << 4).astype(np.uint8).tobytes()
    read = one_tensor(tmp_path, Q4_1, (1, 32), data)
    assert np.array_equal(read[0], np.concatenate([low, high]) * 0.25 - 1.0)


def test_a_tensor_outlives_the_file(tmp_path: Path) -> None:
    assert one_tensor(tmp_path, F32, (1,), struct.pack("<f", 3.0)).tolist() == [3.0]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"GG", "cut short"),
        (b"PK\x03\x04" + b"\0" * 100, "not a GGUF"),
        (gguf_bytes({}, {}, version=2), "version 2"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array of unsupported type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (gguf_bytes({}, {"t": (12, (256,), b"\0" * 144)}), "GGML type 12"),
        (gguf_bytes({}, {"t": (Q8_0, (33,), b"\0" * 68)}), "whole blocks"),
        (gguf_bytes({}, {"t": (F32, (2**40, 2**40), b"")}), "beyond its end"),
        (gguf_bytes({}, {"t": (F32, (), b"")}), "0 dimensions"),
        (gguf_bytes({"general.alignment": 0}, {}), "alignment"),
    ],
)
def test_what_is_not_a_whole_gguf_file_is_refused(tmp_path: Path, data: bytes, word: str) -> None:
    with pytest.raises(GGUFError, match=word):
        GGUFFile(write(tmp_path / "x.gguf", data))


SMALL: Tensors = {"a": (F32, (2, 3), b"\1" * 24), "q": (Q8_0, (1, 32), b"\1" * 34)}
WHOLE = gguf_bytes({"key": "value", "list": [1, 2, 3]}, SMALL)


@given(st.integers(0, len(WHOLE) - 31))
def test_cut_anywhere_it_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "x.gguf", WHOLE[:length])
    with pytest.raises(GGUFError):
        GGUFFile(path)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_one_wrong_byte_never_crashes(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int) -> None:
    damaged = WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    path = write(tmp_path_factory.mktemp("flip") / "x.gguf", damaged)
    with contextlib.suppress(GGUFError), GGUFFile(path) as gguf:
        for name in gguf.tensors:
            assert gguf.tensor(name).shape == gguf.tensors[name].shape


def test_every_tensor_of_a_llama(tmp_path: Path) -> None:
    tensors, arrays = llama_tensors()
    with GGUFFile(write(tmp_path / "x.gguf", gguf_bytes(llama_metadata(), tensors))) as gguf:
        assert gguf.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(gguf.tensor(name), array)
