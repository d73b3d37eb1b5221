"""The facts of TensorRT-LLM 1.2.1's API that this adapter relies on, as recorded from its source (`contract.json`).

Each has a confidence: *exact* was read in the 1.2.1 source, *near* in a neighbouring version. Knows no installed package: the
verifier compares one with this, the tests compare their double with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

VERSION = "1.2.1"
NO_DEFAULT = object()
LLM_FACT, GENERATE, SAMPLING = "llmapi.LLM.__init__", "llmapi.LLM.generate_async", "llmapi.SamplingParams"
KV_CACHE, TRANSCEIVER = "llmapi.KvCacheConfig", "llmapi.CacheTransceiverConfig"
DISAGGREGATED = "disaggregated_params.DisaggregatedParams"
RESULT, COMPLETION = "executor.result.GenerationResult (base of RequestOutput)", "executor.result.CompletionOutput"
ARGS_EXACT, ARGS_NEAR = "llm args seen exact in 1.2.1", "llm args near"
REQUEST_ERROR = "executor.utils.RequestError"
LORA_REQUEST, LORA_CONFIG = "executor.request.LoRARequest", "lora_helper.LoraConfig"
SPECULATIVE_BASE = "llmapi.DecodingBaseConfig"
SPECULATIVE = {
    "Eagle": "EagleDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "AUTO": "AutoDecodingConfig",
}
"""By decoding type, the class in `llmapi`. Those of 1.2.1 that its PyTorch backend serves: without Medusa and Lookahead, which it
has not, UserProvided, which takes objects, and SaveState, which only writes files."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or field. `default`: a literal, or an expression as text ("[]", "SchedulerConfig()"); NO_DEFAULT = none."""

    name: str
    default: Any = NO_DEFAULT


@cache
def _facts() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files(__package__).joinpath("contract.json").read_text(encoding="utf-8"))
    return loaded


def fact(name: str) -> dict[str, Any]:
    """What is recorded under `name`. Raises KeyError."""
    recorded: dict[str, Any] = _facts()[name]
    return recorded


def exact(name: str) -> bool:
    """It was read in the source of 1.2.1 itself."""
    return str(fact(name)["confidence"]).startswith("exact")


def parameters(name: str) -> tuple[Parameter, ...]:
    """The parameters or fields of a fact, in order."""
    rows = fact(name).get("params", fact(name).get("fields", ()))
    return tuple(Parameter(row[0], row[1] if len(row) > 1 else NO_DEFAULT) for row in rows)


def names(name: str) -> frozenset[str]:
    return frozenset(parameter.name for parameter in parameters(name))


def argument_names() -> frozenset[str]:
    """What `LLM(...)` takes by keyword: its own parameters and the fields of its arguments model."""
    configs = {"kv_cache_config"}  # named by the documentation of the facts, not among the fields that were read
    return names(LLM_FACT) | names(ARGS_EXACT) | names(ARGS_NEAR) | configs
