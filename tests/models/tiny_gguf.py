"""Writes GGUF files byte by byte, and a tiny llama in one: the reader's and the converter's other half."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.models.catalog import KnownModel
from services.text.vocabulary import byte_alphabet

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
Tensors = Mapping[str, tuple[int, tuple[int, ...], bytes]]
"""name → (GGML type, shape outermost first, bytes)"""


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A typed metadata value; lists are arrays of their first item's type."""
    if isinstance(item, list):
        return struct.pack("<IIQ", 9, struct.unpack("<I", value(item[0])[:4])[0], len(item)) + b"".join(
            value(each)[4:] for each in item
        )
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<I", 8) + string(item)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Tensors, *, version: int = 3, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += data + b"\0" * (-len(data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body


def llama_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<|end|>", *byte_alphabet(), "he"]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|end|>",
        **changes,
    }


def llama_tensors(seed: int = 0) -> tuple[dict[str, tuple[int, tuple[int, ...], bytes]], dict[str, NDArray[np.float32]]]:
    """Random float16 linears and float32 norms of the tiny llama: as GGUF tensors, and as they went in."""
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (258, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        parts |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        parts |= {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        parts |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    arrays = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    tensors = {
        name: (F32, array.shape, array.astype("<f4").tobytes()) if array.ndim == 1 else (F16, array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return tensors, {name: array.astype(np.float32) for name, array in arrays.items()}


def write_wheel(folder: Path) -> KnownModel:
    """A wheel with the tiny llama in it, as a known model: `folder/tinyllama-1.0-py3-none-any.whl`."""
    gguf = gguf_bytes(llama_metadata(), llama_tensors()[0])
    wheel = folder / "tiny_llama_test-1.0-py3-none-any.whl"
    about = "tiny_llama_test-1.0.dist-info"
    files: dict[str, str | bytes] = {
        "tiny_llama_test/model.gguf": gguf,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-llama-test\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():  # a ZipInfo has a fixed date: the same bytes, whenever it is made
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    data = wheel.read_bytes()
    return KnownModel(
        generation={"temperature": 0.5, "top_p": 0.8},
        name="tiny",
        license="none",
        package="tiny-llama-test",
        version="1.0",
        wheel=wheel.name,
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member="tiny_llama_test/model.gguf",
        gguf_bytes=len(gguf),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        converted_bytes=400_000,
    )
