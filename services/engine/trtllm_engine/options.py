"""Our settings as the arguments of TensorRT-LLM's `LLM`.

Pure, but for a look at the adapters' folders. Invariants: `kv_transfer_timeout_ms` is set always; what computes prompts runs
without the overlap scheduler, as 1.2.1 wants it; `extra` neither invents an argument nor replaces one that a setting stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.state import Role
from services.engine.trtllm_engine.adapters import Adapter, read_adapters
from services.engine.trtllm_engine.contract import KV_CACHE, TRANSCEIVER, argument_names, names
from services.engine.trtllm_engine.speculation import Speculation, speculation
from services.settings import SettingsError, TrtllmSettings


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of `LLM(model, …)`, and of what is an object of a class of the package."""

    llm: dict[str, Any]
    kv_cache: dict[str, Any]
    transceiver: dict[str, Any]
    speculation: Speculation | None
    adapters: tuple[Adapter, ...]


def options(settings: TrtllmSettings, role: Role, context_length: int) -> Options:
    """`context_length`: tokens of prompt and answer together. Raises `SettingsError` that names the key."""
    if settings.pipeline_parallel > 1 and role is not Role.BOTH:
        raise SettingsError("trtllm.pipeline_parallel: 1.2's release notes know a hang with it when phases are apart; use 1")
    extra = _extra(settings)
    llm: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "dtype": settings.dtype,
        "skip_tokenizer_init": not settings.guided_decoding,  # a grammar needs the tokenizer, nothing else does
        "max_batch_size": settings.max_batch,
        "max_num_tokens": settings.step_tokens,
        "max_seq_len": context_length,
        "max_beam_width": 1,
        "enable_chunked_prefill": settings.chunked_prefill,
        "disable_overlap_scheduler": role is not Role.DECODE,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": False,
    }
    if settings.guided_decoding:
        llm["guided_decoding_backend"] = settings.guided_decoding
    kv_cache = {
        "free_gpu_memory_fraction": settings.kv_fraction,
        "enable_block_reuse": settings.block_reuse,
        "event_buffer_max_size": settings.event_buffer if settings.block_reuse else 0,
        "dtype": settings.kv_dtype,
        "tokens_per_block": settings.block_tokens,
        **extra.pop("kv_cache_config", {}),
    }
    transceiver = {
        "backend": settings.transceiver,
        "max_tokens_in_buffer": context_length,
        "kv_transfer_timeout_ms": max(1, round(1000 * settings.transfer_timeout_s)),
        **extra.pop("cache_transceiver_config", {}),
    }
    speculative = speculation(settings.speculative) if settings.speculative else None
    return Options(llm | extra, kv_cache, transceiver, speculative, read_adapters(settings))


_OURS = frozenset(
    "model tokenizer skip_tokenizer_init tensor_parallel_size pipeline_parallel_size dtype max_batch_size max_num_tokens "
    "max_seq_len max_beam_width enable_chunked_prefill disable_overlap_scheduler enable_iter_perf_stats return_perf_metrics "
    "guided_decoding_backend speculative_config enable_lora lora_config trust_remote_code stream_interval".split()
)
"""`trust_remote_code` would run what a model's folder holds; the others have a key of their own or must be as they are."""
_OUR_CONFIGS = {
    "kv_cache_config": frozenset(
        {"free_gpu_memory_fraction", "enable_block_reuse", "event_buffer_max_size", "dtype", "tokens_per_block"}
    ),
    "cache_transceiver_config": frozenset({"backend", "kv_transfer_timeout_ms"}),
}
_CONFIG_FACTS = {"kv_cache_config": KV_CACHE, "cache_transceiver_config": TRANSCEIVER}


def _extra(settings: TrtllmSettings) -> dict[str, Any]:
    """A copy of `extra` that is safe to pass on."""
    known = argument_names() - _OURS
    for name, value in settings.extra.items():
        if name in _OURS:
            raise SettingsError(f"trtllm.extra.{name}: has a setting of its own, or must be as it is")
        if name not in known:
            raise SettingsError(f"trtllm.extra.{name}: TensorRT-LLM 1.2.1 takes no such argument, as far as is recorded")
        if name in _CONFIG_FACTS:
            _check_config(name, value)
    return dict(settings.extra)


def _check_config(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise SettingsError(f"trtllm.extra.{name}: is no table")
    for key in value:
        if key in _OUR_CONFIGS[name]:
            raise SettingsError(f"trtllm.extra.{name}.{key}: has a setting of its own")
        if key not in names(_CONFIG_FACTS[name]):
            raise SettingsError(f"trtllm.extra.{name}.{key}: TensorRT-LLM 1.2.1 has no such field")
