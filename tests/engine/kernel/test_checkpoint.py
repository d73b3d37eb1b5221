"""Safetensors files mapped: what lies where, and files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine.kernel.library import DType
from services.models.errors import ModelError


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float16, DType.F16), (torch.bfloat16, DType.BF16), (torch.float32, DType.F32)], ids=str
)
def test_tensors_of_several_files(tmp_path: Path, dtype: torch.dtype, stored: DType) -> None:
    made = {name: torch.randn(shape).to(dtype) for name, shape in {"a": (3, 5), "b": (7,)}.items()}
    for name, tensor in made.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    mapped = map_checkpoint([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert set(mapped) == {"a", "b"}
    for name, tensor in made.items():
        assert mapped[name].dtype is stored
        assert np.array_equal(mapped[name].as_float32(), tensor.float().numpy())


def test_what_is_mapped_cannot_be_written(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="read-only"):
        map_checkpoint([tmp_path / "a.safetensors"])["a"].data[0] = 1


def _file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    encoded = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)
    return file


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}, b"1234567"),
        ({"dtype": "F16", "shape": [4], "data_offsets": [-8, 0]}, b"12345678"),
        ({"dtype": "F16", "shape": [5], "data_offsets": [0, 8]}, b"12345678"),
        ({"dtype": "F16", "shape": [4]}, b"12345678"),
        ({"dtype": "F16", "shape": "four", "data_offsets": [0, 8]}, b"12345678"),
        (["F16", [4]], b"12345678"),
    ],
)
def test_a_header_that_promises_what_is_not_there(tmp_path: Path, entry: object, data: bytes) -> None:
    file = _file(tmp_path, {"a": entry}, data)
    with pytest.raises(ModelError, match=f"{file} is not a whole safetensors file"):
        map_checkpoint([file])


@pytest.mark.parametrize("length", [0, 10**6, 2**63])
def test_a_header_length_that_cannot_be(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        map_checkpoint([_file(tmp_path, {}, length=length)])


@pytest.mark.parametrize("content", [b"", b"123", b"\x08\0\0\0\0\0\0\0not json"])
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        map_checkpoint([tmp_path / "model.safetensors"])


def test_a_storage_type_that_the_kernel_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a is stored as F8_E4M3"):
        map_checkpoint([_file(tmp_path, {"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"1")])
