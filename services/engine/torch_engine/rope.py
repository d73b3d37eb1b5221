"""Rotary position embedding: the frequencies of a head, and what stretches them beyond the context a model was trained in.

Owns the arithmetic, in float32 as transformers does it, because checkpoints were trained with those roundings; loads no torch.
Sources: RoPE (arXiv 2104.09864), position interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3.1's model card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.models.errors import ModelError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """All positions lie `factor` times closer."""

    factor: float

    def stretch(self, frequencies: Floats, theta: float) -> Floats:
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Waves that turn less than `low` times in the `original` context are stretched, those of more than `high` turns are kept."""

    factor: float
    low: float
    high: float
    original: int

    def stretch(self, frequencies: Floats, theta: float) -> Floats:
        turns = np.float32(self.original) * frequencies / np.float32(2 * math.pi)
        kept = np.clip((turns - np.float32(self.low)) / np.float32(self.high - self.low), 0.0, 1.0).astype(np.float32)
        stretched: Floats = (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies
        return stretched


@dataclass(frozen=True, slots=True)
class Yarn:
    """As Llama3, but with a ramp over the dimensions from `fast` to `slow` turns; and `amplitude` for cos and sin."""

    factor: float
    fast: float
    slow: float
    original: int
    amplitude: float
    truncate: bool = True

    def stretch(self, frequencies: Floats, theta: float) -> Floats:
        first, last = (self._dimension(turns, 2 * len(frequencies), theta) for turns in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, 2.0 * len(frequencies) - 1)
        width = last - first or 0.001  # a ramp, however steep
        ramp = np.clip((np.arange(len(frequencies), dtype=np.float32) - first) / width, 0.0, 1.0).astype(np.float32)
        stretched: Floats = frequencies / np.float32(self.factor) * ramp + frequencies * (1 - ramp)
        return stretched

    def _dimension(self, turns: float, width: int, theta: float) -> float:
        """The dimension (of half a head) whose wave turns so often in the original context."""
        return width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True, slots=True)
class Rope:
    """`amplitude`: what cos and sin are multiplied with."""

    theta: float
    scaling: Scaling | None = None

    def frequencies(self, head_dim: int) -> Floats:
        """Radians a token, [head_dim / 2]."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        plain = np.float32(1.0) / np.float32(self.theta) ** exponents
        return plain if self.scaling is None else self.scaling.stretch(plain, self.theta).astype(np.float32)

    @property
    def amplitude(self) -> float:
        return self.scaling.amplitude if isinstance(self.scaling, Yarn) else 1.0

    def tables(self, head_dim: int, tokens: int) -> tuple[Floats, Floats]:
        """cos and sin [tokens, head_dim / 2]; the angles are float32 products."""
        angles = np.arange(tokens, dtype=np.float32)[:, None] * self.frequencies(head_dim)
        factor = np.float32(self.amplitude)
        return np.cos(angles) * factor, np.sin(angles) * factor


def parse_rope(raw: Mapping[str, Any]) -> Rope:
    """The `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (earlier ones) of a config.json.

    Raises `ModelError` for a kind this engine does not compute, or one with parts missing; TypeError, ValueError.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"rope parameters by layer type ({', '.join(rope)}) are not supported by this engine")
    theta = float(_first(rope.get("rope_theta"), raw.get("rope_theta"), 10_000.0))
    if (part := _first(rope.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), 1.0)) != 1.0:
        raise ModelError(f"partial_rotary_factor {part} is not supported by this engine")
    if not 1.0 < theta < math.inf:
        raise ModelError(f"rope_theta {theta} makes no frequencies")
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    trained = "original_max_position_embeddings"  # beside the scaling or in it
    original = int(_first(raw.get(trained), rope.get(trained), raw["max_position_embeddings"]))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, Linear(_factor(rope, kind, "factor")))
    if kind == "llama3":
        low, high = _factor(rope, kind, "low_freq_factor"), _factor(rope, kind, "high_freq_factor")
        if not low < high:
            raise ModelError(f"rope scaling 'llama3': low_freq_factor {low} is not below high_freq_factor {high}")
        return Rope(theta, Llama3(_factor(rope, kind, "factor"), low, high, original))
    if kind == "yarn":
        return Rope(theta, _yarn(rope, original))
    raise ModelError(f"rope scaling {kind!r} is not supported by this engine, which computes default, linear, llama3 and yarn")


def _yarn(rope: Mapping[str, Any], original: int) -> Yarn:
    factor = _factor(rope, "yarn", "factor")
    return Yarn(
        factor=factor,
        fast=float(rope.get("beta_fast") or 32),
        slow=float(rope.get("beta_slow") or 1),
        original=original,
        amplitude=_amplitude(rope, factor),
        truncate=bool(_first(rope.get("truncate"), True)),
    )


def _amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, as given, or from `mscale` over `mscale_all_dim`, or as its authors found it."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(of: float) -> float:
        return 0.1 * of * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(float(over)) / scale(float(under)) if over and under else scale(1.0)


def _factor(rope: Mapping[str, Any], kind: str, key: str) -> float:
    value = rope.get(key)
    if value is None or not 0.0 < float(value) < math.inf:
        raise ModelError(f"rope scaling {kind!r} with {key} {value!r}")
    return float(value)


def _first(*values: Any) -> Any:
    """The first that is given; JSON null is not."""
    return next(value for value in values if value is not None)
