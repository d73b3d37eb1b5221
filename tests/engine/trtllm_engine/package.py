"""Source of a `tensorrt_llm` that agrees with the contract, made from it: what the verifier reads when there is no wheel.

It is never imported. `edit` changes one file before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.engine.trtllm_engine import contract
from services.engine.trtllm_engine.contract import NO_DEFAULT, Parameter

Edit = Callable[[str, str], str]


def write(folder: Path, edit: Edit = lambda name, text: text) -> Path:
    """The package's folder under `folder`."""
    package = folder / "tensorrt_llm"
    for name, text in _files().items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edit(name, text))
    return package


def _files() -> dict[str, str]:
    result = contract.fact(contract.RESULT)
    members = [*result["properties"], *result["methods"]]
    return {
        "version.py": f'__version__ = "{contract.VERSION}"\n',
        "llmapi/llm.py": "class BaseLLM:\n"
        + _method("__init__", contract.LLM_FACT, "**kwargs: Any")
        + "".join(
            _method(name, f"llmapi.LLM.{name}")
            for name in ("generate_async", "get_stats_async", "get_kv_cache_events_async", "shutdown")
        )
        + "class LLM(BaseLLM):\n    pass\n",
        "llmapi/llm_args.py": _model("CacheTransceiverConfig", contract.TRANSCEIVER)
        + _model("KvCacheConfig", contract.KV_CACHE)
        + _model("BaseLlmArgs", contract.ARGS_EXACT)
        + _model("TorchLlmArgs", contract.ARGS_NEAR, "BaseLlmArgs")
        + _model("DecodingBaseConfig", contract.SPECULATIVE_BASE)
        + "".join(_model(name, f"llmapi.{name}", "DecodingBaseConfig") for name in contract.SPECULATIVE.values()),
        "executor/request.py": "@dataclass(slots=True)\n" + _model("LoRARequest", contract.LORA_REQUEST),
        "lora_helper.py": "@dataclass\n" + _model("LoraConfig", contract.LORA_CONFIG),
        "disaggregated_params.py": "@dataclass(slots=True, kw_only=True)\n"
        + _model("DisaggregatedParams", contract.DISAGGREGATED),
        "sampling_params.py": _model("SamplingParams", contract.SAMPLING)
        + _model("GuidedDecodingParams", "llmapi.GuidedDecodingParams"),
        "executor/result.py": "@dataclass(slots=True)\n"
        + _model("CompletionOutput", contract.COMPLETION)
        + "class GenerationResult:\n    def __init__(self):\n        self.cached_tokens = 0\n"
        + "".join(f"    def {name}(self): ...\n" for name in members),
        "executor/utils.py": "class RequestError(RuntimeError):\n    pass\n",
        "executor/base_worker.py": f'text = "{contract.fact("overlap refusal")["text"]} in the backend"\n',
        "_utils.py": 'class KVCacheEventSerializer:\n    keys = ["event_id", "data", "window_size", "parent_hash", "block_hash", '
        '"block_hashes", "tokens", "token_id", "cache_level"]\n',
    }


def _method(name: str, fact: str, more: str = "") -> str:
    given = [_parameter(one) for one in contract.parameters(fact)]
    return f"    def {name}({', '.join(['self', *given, *([more] if more else [])])}):\n        ...\n"


def _model(name: str, fact: str, base: str = "") -> str:
    rows = "".join(f"    {one.name}: object = {_field(one.default)}\n" for one in contract.parameters(fact))
    return f"class {name}{f'({base})' if base else ''}:\n" + (rows or "    pass\n")


def _parameter(one: Parameter) -> str:
    return f"{one.name}: Any" if one.default is NO_DEFAULT else f"{one.name}: Any = {one.default!r}"


def _field(default: Any) -> str:
    """As pydantic or dataclasses write it."""
    if default is NO_DEFAULT:
        return "Field(...)"
    if default in ("[]", "{}"):
        return f"field(default_factory={'list' if default == '[]' else 'dict'})"
    if isinstance(default, str) and default.endswith("()"):
        return f"Field(default_factory={default[:-2]})"
    return f"Field(default={default!r}, description='')"
