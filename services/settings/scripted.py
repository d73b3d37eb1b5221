"""The engine that plays fixed token ids."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.settings.section import LARGEST, LONGEST_S, Section


class ScriptedSettings(Section):
    """The engine that plays fixed token ids. `scripts` is a JSON file, see services/engine/scripted.py.

    `numerics` goes into `kv_compat`, so that two builds of equal weights can differ, as engines do. `n`: several choices in one
    run; without it an edge makes a job of each, as for TensorRT-LLM.
    """

    scripts: Path | None = None
    prefill_token_s: float = Field(0.0, ge=0, le=LONGEST_S)
    decode_step_s: float = Field(0.0, ge=0, le=LONGEST_S)
    block_tokens: int = Field(16, gt=0, le=LARGEST)
    block_bytes: int = Field(4096, ge=128, le=LARGEST)
    numerics: str = "exact"
    n: bool = True
